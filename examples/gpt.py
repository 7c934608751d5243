"""A small GPT on bytes: model, data, optimizer and schedule, in plain PyTorch.

`train_gpt.py` trains it under perdure; the benchmarks train the same objects under DDP and others.
Nothing here knows about perdure.
"""

from __future__ import annotations

import math
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name every PyTorch reader knows)

VOCABULARY = 256
"""One token per byte: no tokenizer, any file is text."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The default has about 3.3 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a 4× wide MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) → (batch, time, width)."""
        batch, time, width = x.shape
        qkv = self.attention(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        hidden = self.narrow(F.gelu(self.widen(self.mlp_norm(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Decoder-only transformer (Radford et al. 2019) whose output layer is the token embedding, tied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not divisible by {config.heads} heads")
        self.config = config
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                # Projections into the residual stream shrink with depth, so that its variance does not grow.
                deep = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, time) → logits of each next token (batch, time, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt` continued by `length` bytes, drawn with a generator of its own: the same every time."""
        training, device = self.training, self.token.weight.device
        self.eval()
        generator = torch.Generator(device).manual_seed(seed)
        text = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(text[:, -self.config.context :])[:, -1] / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            text = torch.cat([text, drawn], dim=1)
        self.train(training)
        return bytes(text[0].tolist())


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte over (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Bytes cut into windows of `context`; an item is (window, the same window one byte later)."""

    def __init__(self, data: torch.Tensor, context: int) -> None:
        self.data, self.context = data, context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.data[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def load_text(path: Path | None, context: int, *, held_out: float = 0.05) -> tuple[Text, Text]:
    """Training and validation windows of a file, or of the standard library's own source (`path=None`)."""
    raw = standard_library() if path is None else path.read_bytes()
    split = int(len(raw) * (1 - held_out))
    if min(split, len(raw) - split) <= context:
        raise SystemExit(f"{path or 'text'}: {len(raw)} bytes are too few for a context of {context}")
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Text(data[:split], context), Text(data[split:], context)


def standard_library() -> bytes:
    """The Python files of the standard library, in a fixed order, without tests: about 12 MB."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    parts = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - left_out)
        parts += [Path(folder, name).read_bytes() for name in sorted(names) if name.endswith(".py")]
    return b"".join(parts)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay; biases, norms and other vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over the first 5 % of `steps`, then a cosine down to a tenth of the peak."""
    warm_up = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

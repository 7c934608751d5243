"""Tiny deterministic training tasks: each holds some of the traps that bit-exact recovery has to survive.

A task trains alike under perdure (`train_task.py`) and under the judge (`reference.py`); six steps take well
under a second. Data are drawn from a fixed seed, models from the seed given to `build`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, GPTConfig, Text, loss_fn, make_optimizer

Weighted = tuple[torch.Tensor | None, float]
"""A micro-batch's loss and weight; None leaves the micro-batch out."""


@dataclass(frozen=True)
class Parts:
    """What a task trains: `protected` by name, `loss(batch)`, and `commit()` once `.grad` is global."""

    protected: dict[str, Any]
    dataset: Any
    loss: Callable[[Any], Weighted]
    commit: Callable[[], None]


@dataclass(frozen=True)
class Task:
    """A recipe. A step has `per_step` micro-batches of `batch_size` samples."""

    build: Callable[[int], Parts]
    batch_size: int = 4
    per_step: int = 8
    drop_last: bool = True


class Numbers(torch.utils.data.Dataset[Any]):
    """Regression pairs with their index; with `noise` each sample draws from all three generators."""

    def __init__(self, samples: int = 150, width: int = 12, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, width, generator=generator)
        self.y = torch.randn(samples, 1, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, self.y[index], index


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The plainest commit: one step of the optimizer."""

    def commit() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return commit


def _mlp(seed: int) -> Parts:
    """Dropout, random transforms, gradient noise drawn in the commit; SGD with momentum and StepLR."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    def commit() -> None:
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3 * random.random())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return Parts(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler}, Numbers(noise=True), loss, commit
    )


def _gpt(seed: int) -> Parts:
    """A transformer with tied embedding, AdamW in two groups, clipped gradients."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=16))
    optimizer = make_optimizer(model, 3e-3)
    text = torch.randint(256, (16 * 120 + 1,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    def loss(batch: Any) -> Weighted:
        x, y = batch
        return loss_fn(model(x), y), 1

    def commit() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Parts({"model": model, "optimizer": optimizer}, Text(text, 16), loss, commit)


def _batchnorm(seed: int) -> Parts:
    """Buffers that forward changes (E8), one of them an integer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


class Branches(nn.Module):
    """Which parameters are used depends on the samples; one is frozen, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(12, 8)
        self.even, self.odd, self.rare, self.never = (nn.Linear(8, 1) for _ in range(4))
        self.frozen = nn.Linear(12, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        hidden = torch.tanh(self.common(x) + self.frozen(x))
        result: torch.Tensor = (self.even if index % 2 == 0 else self.odd)(hidden)
        return result + self.rare(hidden) if index % 19 == 0 else result


def _unused(seed: int) -> Parts:
    """Absent is not zero (E2): AdamW would move a parameter whose gradient is zero. `rare` misses steps."""
    torch.manual_seed(seed)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(batch: Any) -> Weighted:
        x, y, index = batch
        return F.mse_loss(model(x, int(index[0])), y), 1

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


class MasterSGD(torch.optim.Optimizer):
    """SGD on fp32 copies of low-precision parameters: state whose dtype is not its parameter's (E6)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    master = state.setdefault("master", parameter.float())
                    master.sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.copy_(master)


class Mixed(nn.Module):
    """Parameters of two dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(12, 16, dtype=torch.bfloat16)
        self.high = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.high(torch.tanh(self.low(x.bfloat16())).float())
        return result


def _mixed(seed: int) -> Parts:
    """bf16 beside fp32 parameters (E11), some with fp32 state; a learning rate in a tensor (E6)."""
    torch.manual_seed(seed)
    model = Mixed()
    low = MasterSGD(model.low.parameters(), lr=0.05)
    high = torch.optim.AdamW(model.high.parameters(), lr=torch.tensor(0.01))

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    def commit() -> None:
        for optimizer in (low, high):
            optimizer.step()
            optimizer.zero_grad()

    return Parts({"model": model, "low": low, "high": high}, Numbers(), loss, commit)


def _two_optimizers(seed: int) -> Parts:
    """Two models, two optimizers that take turns, two schedulers, and an averaged copy of one model."""
    torch.manual_seed(seed)
    encoder, head = nn.Linear(12, 16), nn.Linear(16, 1)
    first = torch.optim.Adam(encoder.parameters(), lr=0.01, amsgrad=True)
    second = torch.optim.RMSprop(head.parameters(), lr=0.01, momentum=0.5)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.02, total_steps=100_000),
        torch.optim.lr_scheduler.ExponentialLR(second, 0.9),
    ]
    averaged = torch.optim.swa_utils.AveragedModel(
        encoder, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.l1_loss(head(torch.relu(encoder(x))), y), 1

    def commit() -> None:
        first.step()
        if schedulers[1].last_epoch % 2 == 0:  # protected, so that a joiner takes its turn at the right step
            second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        averaged.update_parameters(encoder)

    protected = {
        "encoder": encoder, "head": head, "first": first, "second": second, "first_lr": schedulers[0],
        "second_lr": schedulers[1], "averaged": averaged,
    }  # fmt: skip
    return Parts(protected, Numbers(), loss, commit)


def _weighted(seed: int) -> Parts:
    """A mean over tokens: micro-batches weigh what they hold, and some are left out."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(batch: Any) -> Weighted:
        x, y, index = batch
        if int(index[0]) % 5 == 0:
            return None, 0
        kept = (x[:, 0] > -0.5).float()
        weight = 1 + int(kept.sum())
        errors = (model(x) - y).square().squeeze(1)
        return ((errors * kept).sum() + errors[0]) / weight, weight

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


TASKS = {
    "mlp": Task(_mlp),
    "gpt": Task(_gpt, batch_size=2),
    "batchnorm": Task(_batchnorm),
    "unused": Task(_unused),
    "mixed": Task(_mixed),
    "two_optimizers": Task(_two_optimizers),
    "weighted": Task(_weighted),
}

"""Training tasks off the beaten path, in the form of `tasks.py`: the judge trains them too."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tasks import Numbers, Parts, Task, Weighted, stepping


@dataclass(frozen=True)
class Losses:
    """Several losses of one micro-batch, each a backward call of weight 1; `* weight` is for the judge."""

    each: tuple[torch.Tensor, ...]

    def __mul__(self, weight: float) -> Losses:
        assert weight == len(self.each)
        return self

    def backward(self) -> None:
        for loss in self.each:
            loss.backward()


class Tied(nn.Module):
    """One linear layer used twice, inside and outside of a re-entrant checkpoint: its hook fires twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.enter(x))
        hidden = checkpoint(lambda h: torch.tanh(self.dropout(self.middle(h))), hidden, use_reentrant=True)
        result: torch.Tensor = self.leave(torch.tanh(self.middle(hidden)))
        return result


def _tied(seed: int) -> Parts:
    """Re-entrant checkpointing, tied weights, a GradScaler, clipping, a schedule, an own generator."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    generator = torch.Generator().manual_seed(seed)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return scaler.scale(F.mse_loss(model(x), y)), 1

    def commit() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            model.enter.bias.add_(torch.randn(16, generator=generator), alpha=1e-3)

    protected = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler,
        "generator": generator,
    }  # fmt: skip
    return Parts(protected, Numbers(), loss, commit)


def _several_losses(seed: int, uneven: bool) -> Parts:
    """Two calls of backward a micro-batch; `uneven`: only if its first sample is 3 modulo 4."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(batch: Any) -> Any:
        x, y, index = batch
        first = F.mse_loss(model(x)[:, :1], y)
        if uneven and int(index[0]) % 4 != 3:
            return Losses((first,)), 1
        return Losses((first, F.l1_loss(model(x)[:, 1:], y))), 2

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


def _compiled(seed: int) -> Parts:
    """torch.compile, without its code generator: what matters here is who accumulates gradients, and when."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="aot_eager")

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(compiled(x), y), 1

    return Parts({"model": compiled, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


def _averaged(seed: int) -> Parts:
    """An EMA by hand, and an epoch of 50 samples: a step of 32 and one of 18, its last batch of 2."""
    torch.manual_seed(seed)
    model, average = nn.Linear(12, 1), nn.Linear(12, 1)
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), len(x)

    def commit() -> None:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)

    protected = {"model": model, "average": average, "optimizer": optimizer}
    return Parts(protected, Numbers(50, noise=True), loss, commit)


class Flaky(Numbers):
    """Sample 142 cannot be read while a file `broken` is there; a file `loose` it takes away by that."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if index == 142:
            with contextlib.suppress(FileNotFoundError):
                Path("loose").unlink()
                raise OSError("sample 142 could not be read")
            if Path("broken").exists():
                raise OSError("sample 142 could not be read")
        return super().__getitem__(index)


def _flaky(seed: int) -> Parts:
    """An error in the data set."""
    torch.manual_seed(seed)
    model = nn.Linear(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    return Parts({"model": model, "optimizer": optimizer}, Flaky(), loss, stepping(optimizer))


WIDE = 1024 * 1024 + 12 * 1024 + 2 * 1024 + 1024 + 1
"""Parameters of the task `wide`."""


def _wide(seed: int) -> Parts:
    """Enough parameters for a gradient to be seen in the memory of a process."""
    torch.manual_seed(seed)
    layers = [nn.Linear(12, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


class Centred(nn.Module):
    """Its forward replaces a buffer that decides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def _renormed(seed: int) -> Parts:
    """Forward passes change buffers that decide what the next one gives: in place, and by replacing them."""
    torch.manual_seed(seed)
    model = nn.Sequential(spectral_norm(nn.Linear(12, 16)), Centred(), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    return Parts({"model": model, "optimizer": optimizer}, Numbers(), loss, stepping(optimizer))


def _modes(seed: int) -> Parts:
    """After the first step dropout is off and running statistics stay: who comes later is not told."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.99)

    def loss(batch: Any) -> Weighted:
        x, y, _ = batch
        return F.mse_loss(model(x), y), 1

    def commit() -> None:
        stepping(optimizer)()
        scheduler.step()
        if scheduler.last_epoch == 1:
            model[1].eval()
            model[2].eval()

    return Parts({"model": model, "optimizer": optimizer, "scheduler": scheduler}, Numbers(), loss, commit)


TASKS = {
    "renormed": Task(_renormed),
    "modes": Task(_modes),
    "wide": Task(_wide),
    "flaky": Task(_flaky),
    "tied": Task(_tied),
    "several_losses": Task(lambda seed: _several_losses(seed, uneven=False)),
    "uneven_losses": Task(lambda seed: _several_losses(seed, uneven=True)),
    "compiled": Task(_compiled),
    "averaged": Task(_averaged, drop_last=False),
    "many_blocks": Task(_averaged, batch_size=1, per_step=40),
}

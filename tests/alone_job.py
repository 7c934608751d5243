"""A script that runs alone, without a launcher, for tests of what the API refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import perdure
from tasks import Numbers


class Training:
    """A model to train; `loop` protects it and runs one step with `body` for each batch."""

    def __init__(self, job: perdure.Job, model: nn.Module | None = None) -> None:
        self.job = job
        self.model = model or nn.Linear(12, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.fused: torch.optim.Optimizer = self.optimizer
        self.teacher = nn.Linear(12, 1).requires_grad_(False)
        self.batches = perdure.MicroBatches(Numbers(), 4, 2)

    def loop(self, body: Callable[[Any, torch.Tensor], None]) -> None:
        self.job.protect(model=self.model, optimizer=self.optimizer)
        for step in self.job.steps(self.batches, until=2):
            for x, y, _ in step:
                body(step, (self.model(x) - y).square().mean())
            self.optimizer.step()

    def after_its_loop(self, steps: int = 1) -> Iterator[Any]:
        """Steps, each handed out where its commit is."""
        self.job.protect(model=self.model, optimizer=self.optimizer)
        for step in self.job.steps(self.batches, until=steps):
            for x, _, _ in step:
                step.backward(self.model(x).mean())
            yield step

"""perdure: training that goes on, with the same bits, whoever dies.

    job = perdure.join(seed=0)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(perdure.MicroBatches(dataset, batch_size=8, per_step=16), until=1000):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        optimizer.step(); optimizer.zero_grad()

The names below are loaded when first used, so that the launcher never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.worker.api import Job, join
    from perdure.worker.data import MicroBatches
    from perdure.worker.step import Step

__all__ = ["Job", "MicroBatches", "Step", "join"]

_HOME = {"Job": "api", "Step": "step", "join": "api", "MicroBatches": "data"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"perdure.worker.{_HOME[name]}"), name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""What only the code around a step's loop may change is refused inside it, and told from what is legal."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import perdure
from alone_job import Training
from perdure.schema.errors import UsageError


def _zero_before(training: Training, step: Any, loss: torch.Tensor) -> None:
    training.optimizer.zero_grad()
    step.backward(loss)


def _zero_in_place(training: Training, step: Any, loss: torch.Tensor) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    step.backward(loss)


def _clip(training: Training, step: Any, loss: torch.Tensor) -> None:
    step.backward(loss)
    nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


def _between_two_calls(training: Training, step: Any, loss: torch.Tensor) -> None:
    step.backward(loss, 0.5)
    training.optimizer.zero_grad()
    step.backward(loss.detach().requires_grad_(), 0.5)


def _step(training: Training, step: Any, loss: torch.Tensor) -> None:
    step.backward(loss)
    training.optimizer.step()


def _fused(training: Training, step: Any, loss: torch.Tensor) -> None:
    """torch does not count what a fused optimizer does."""
    step.backward(loss)
    training.fused.step()


def _teacher(training: Training, step: Any, loss: torch.Tensor) -> None:
    """Frozen parameters are state like others."""
    step.backward(loss)
    with torch.no_grad():
        training.teacher.weight.lerp_(training.model.weight, 0.01)


def _load(training: Training, step: Any, loss: torch.Tensor) -> None:
    training.model.load_state_dict(training.model.state_dict())
    step.backward(loss)


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (_zero_before, "micro-batch 1 of step 0: the gradient of model"),
        (_zero_in_place, "micro-batch 1 of step 0: the gradient of model"),
        (_clip, "micro-batch 0 of step 0: the gradient of model"),
        (_between_two_calls, "micro-batch 0 of step 0: the gradient of model"),
        (_step, r"SGD\.step\(\) inside"),
        (_fused, r"AdamW\.step\(\) inside"),
        (_teacher, r"micro-batch 0 of step 0: the parameter teacher\.weight"),
        (_load, "micro-batch 0 of step 0: the parameter model"),
    ],
)
def test_habits_of_a_plain_loop_are_refused_inside_the_step(
    job: perdure.Job, habit: Callable[[Training, Any, torch.Tensor], None], text: str
) -> None:
    training = Training(job)
    training.fused = torch.optim.AdamW(training.model.parameters(), fused=True)
    job.protect(fused=training.fused, teacher=training.teacher)
    with pytest.raises(UsageError, match=text) as refused:
        training.loop(lambda step, loss: habit(training, step, loss))
    assert "inside `for … in step`" in str(refused.value)
    assert "belongs after the loop over the step" in str(refused.value)


def _scheduler(things: dict[str, Any]) -> None:
    things["scheduler"].step()


def _rate(things: dict[str, Any]) -> None:
    things["optimizer"].param_groups[0]["lr"] *= 0.5


def _rate_in_place(things: dict[str, Any]) -> None:
    things["optimizer"].param_groups[0]["lr"].mul_(0.5)


def _generator(things: dict[str, Any]) -> None:
    torch.rand(3, generator=things["generator"])


def _random(things: dict[str, Any]) -> None:
    things["random"].random()


def _numpy(things: dict[str, Any]) -> None:
    things["numpy"].random()


def _teacher_forward(things: dict[str, Any]) -> None:
    with torch.no_grad():
        things["teacher"](torch.randn(4, 12))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_scheduler, r"scheduler \(StepLR\) was changed inside .*before or after the loop over the step"),
        (_rate, r"optimizer \(SGD\) was changed inside"),
        (_rate_in_place, r"optimizer \(SGD\) was changed inside"),
        (_generator, r"generator \(Generator\) was changed inside .*come from the default generators"),
        (_numpy, r"numpy \(Generator\) was changed inside .*come from the default generators"),
        (_random, r"random \(Random\) was changed inside .*come from the default generators"),
        (
            _teacher_forward,
            r"changed the buffer teacher\.1\.\w+, of .*call its eval\(\), or protect",
        ),
    ],
)
def test_what_counts_micro_batches_of_one_worker_is_refused(
    job: perdure.Job, change: Callable[[dict[str, Any]], None], text: str
) -> None:
    training = Training(job)
    rate = torch.tensor(0.1) if change is _rate_in_place else 0.1
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=rate)
    things = {
        "optimizer": training.optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(training.optimizer, 1),
        "generator": torch.Generator(),
        "random": random.Random(1),
        "numpy": np.random.default_rng(1),
        "teacher": nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)).requires_grad_(False),
    }
    job.protect(**{name: thing for name, thing in things.items() if name != "optimizer"})

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        change(things)

    with pytest.raises(UsageError, match="step 0: .*" + text):
        training.loop(body)


def test_a_frozen_part_of_a_trained_model_may_be_protected_by_itself(job: perdure.Job) -> None:
    """Its buffers are put back with the model's: nobody's forward changed them."""
    backbone = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    job.protect(backbone=backbone)
    Training(job, nn.Sequential(backbone, nn.Linear(4, 1))).loop(lambda step, loss: step.backward(loss))


class Breaks(torch.autograd.Function):
    """Its first backward fails, as for lack of memory."""

    once = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Breaks.once:
            Breaks.once = False
            raise RuntimeError("out of memory")
        return gradient


def test_a_backward_that_fails_may_be_tried_again(job: perdure.Job) -> None:
    """E4: what the first one left is thrown away, and the micro-batch comes again."""
    training = Training(job, nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 1)))
    first, last = training.model
    Breaks.once = True
    seen: list[int] = []
    job.protect(model=training.model, optimizer=training.optimizer)
    for step in job.steps(training.batches, until=1):
        for x, _, _ in step:
            seen.append(step.micro_batch)
            try:
                step.backward(last(Breaks.apply(first(x))).mean())
            except RuntimeError:
                step.backward(training.model(x).mean())
    assert seen == [0, 0, 1]


def test_a_backward_that_always_fails_is_not_tried_for_ever(job: perdure.Job) -> None:
    training = Training(job)
    seen: list[int] = []

    def body(step: Any, loss: torch.Tensor) -> None:
        seen.append(step.micro_batch)
        with suppress(RuntimeError):
            step.backward(loss.detach())

    with pytest.raises(UsageError, match=r"micro-batch 0 of step 0 came 3 times.*in its place"):
        training.loop(body)
    assert seen == [0, 0, 0]

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
from perdure.schema.errors import ProtectError, UsageError
from perdure.worker import api
from tasks import Numbers


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


class Centre(nn.Module):
    """Its forward replaces a buffer; the memory of one that is gone may be used again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = self.centre + x.detach().mean()
        return x - self.centre[:4]


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_a_teacher_that_replaces_a_buffer_is_found_out_however_often(job: perdure.Job, forwards: int) -> None:
    training, centre = Training(job), Centre()
    job.protect(centre=centre)

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        for _ in range(forwards):
            centre(torch.ones(4))

    with pytest.raises(UsageError, match=r"step 0: .*changed the buffer centre\.centre"):
        training.loop(body)


class Cache(nn.Module):
    """A constant that its forward makes anew, `grows` longer than it was."""

    def __init__(self, grows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)
        self.grows = grows
        self.register_buffer("cosines", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cosines = torch.ones(len(self.cosines) + self.grows)
        return self.linear(x) * self.cosines[0]


def test_a_constant_that_forward_makes_anew_is_one_and_a_cache_that_grows_is_not(job: perdure.Job) -> None:
    Training(job, Cache(0)).loop(lambda step, loss: step.backward(loss))
    api._joined = None
    other = perdure.join(seed=0)
    with pytest.raises(
        ProtectError, match=r"the buffer model\.cosines was changed in a step.*before job.steps begins"
    ):
        Training(other, Cache(1)).loop(lambda step, loss: step.backward(loss))


@pytest.mark.parametrize("length", [4, 8])
def test_a_commit_may_replace_a_constant_by_one_of_its_form(job: perdure.Job, length: int) -> None:
    training = Training(job, Cache(0))
    steps = training.after_its_loop()
    next(steps)
    training.model.cosines = torch.full((length,), 2.0)
    if length == 4:
        assert next(steps, None) is None
    else:
        with pytest.raises(ProtectError, match=r"model\.cosines was changed in a step"):
            next(steps)


def test_a_buffer_in_the_state_dict_keeps_its_form(job: perdure.Job) -> None:
    model = nn.Sequential(nn.Linear(12, 4), Centre(), nn.Linear(4, 1))

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        model[1].centre = torch.zeros(7)

    with pytest.raises(
        ProtectError, match=r"buffer model\.1\.centre was torch\.float32\[4\] on cpu and is .*\[7\]"
    ):
        Training(job, model).loop(body)


def test_evaluation_leaves_modules_that_are_not_trained_as_they_were(job: perdure.Job) -> None:
    training, centre = Training(job), Centre()
    job.protect(centre=centre)
    validation = perdure.MicroBatches(Numbers(8), 4, 2)
    for _ in training.after_its_loop():
        before = centre.centre
        job.evaluate(lambda batch: {"a": float(centre.eval()(batch[1][:4, 0]).mean())}, validation)
        assert centre.centre is before
        assert centre.training


@pytest.mark.parametrize("in_place", [True, False])
def test_evaluation_leaves_constant_buffers_as_they_were(job: perdure.Job, in_place: bool) -> None:
    """As a cache that grows with longer texts: each worker evaluates texts of its own."""
    training = Training(job, Cache(0))
    model: Any = training.model
    validation = perdure.MicroBatches(Numbers(8), 4, 2)

    def evaluate(batch: Any) -> dict[str, float]:
        if in_place:
            model.cosines.fill_(3)
        else:
            model.cosines = torch.full((9,), 3.0)
        return {"a": 1.0}

    for _ in training.after_its_loop():
        job.evaluate(evaluate, validation)
        assert model.cosines.tolist() == [1.0] * 4


def test_what_was_made_under_inference_mode_may_be_frozen(job: perdure.Job) -> None:
    with torch.inference_mode():
        features = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    job.protect(features=features)
    training, validation = Training(job), perdure.MicroBatches(Numbers(8), 4, 2)
    for _ in training.after_its_loop():
        job.evaluate(lambda batch: {"a": float(features(torch.ones(4, 12)).mean())}, validation)


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

"""The modules' buffers: which may change where, and what happens to them then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import perdure
from alone_job import Training
from perdure.schema.errors import ProtectError, UsageError
from perdure.worker import api
from tasks import Numbers


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


@pytest.mark.parametrize("how", ["in place", "replaced", "grown"])
def test_a_commit_may_change_a_constant_that_keeps_its_form(job: perdure.Job, how: str) -> None:
    training = Training(job, Cache(0))
    model: Any = training.model
    steps = training.after_its_loop()
    next(steps)
    if how == "in place":
        model.cosines.fill_(2.0)
    else:
        model.cosines = torch.full((8 if how == "grown" else 4,), 2.0)
    if how != "grown":
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


class Lazy(nn.Module):
    """It makes a buffer when it is first needed: in training, or only in evaluation."""

    def __init__(self, persistent: bool, in_training: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)
        self.register_buffer("mask", None, persistent=persistent)
        self.in_training = in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None and (self.in_training or not self.training):
            self.mask = torch.ones(4)
        return self.linear(x)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_is_not_made_in_a_step(job: perdure.Job, persistent: bool) -> None:
    """Workers that compute less would not have it."""
    with pytest.raises(ProtectError, match=r"mask was None and was made in a step .* before job"):
        Training(job, Lazy(persistent, True)).loop(lambda step, loss: step.backward(loss))


def test_a_buffer_may_be_made_in_the_commit_or_before_training(job: perdure.Job) -> None:
    model = Lazy(True, True)
    model(torch.ones(4, 12))
    Training(job, model).loop(lambda step, loss: step.backward(loss))
    api._joined = None
    training = Training(perdure.join(seed=0), Lazy(False, False))
    steps = training.after_its_loop()
    next(steps)
    training.model.mask = torch.ones(3)
    assert next(steps, None) is None


@pytest.mark.parametrize("how", ["in place", "replaced", "grown", "made", "made in a frozen one"])
def test_evaluation_may_not_change_constants(job: perdure.Job, how: str) -> None:
    """Each worker evaluates texts of its own; what else the module knows of its cache is not put back."""
    frozen: Any = Lazy(False, False).requires_grad_(False)
    training = Training(job, Lazy(False, False) if how == "made" else Cache(0))
    model: Any = training.model
    job.protect(frozen=frozen)
    validation = perdure.MicroBatches(Numbers(8), 4, 2)

    def evaluate(batch: Any) -> dict[str, float]:
        if how == "in place":
            model.cosines.fill_(3)
        elif how in ("replaced", "grown"):
            model.cosines = torch.full((9 if how == "grown" else 4,), 3.0)
        else:
            (model if how == "made" else frozen).eval()(torch.ones(4, 12))
        return {"a": 1.0}

    next(steps := training.after_its_loop())
    with pytest.raises(ProtectError, match=r"was changed in job.evaluate, .*or be a plain attribute"):
        job.evaluate(evaluate, validation)
    assert steps


class Odd(nn.Module):
    """Constants that look changed, and a statistic that nothing can be written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)
        mean, self.std = torch.zeros(2, 4).unbind(0)
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", self.std, persistent=False)
        self.register_buffer("weight", self.linear.weight.detach(), persistent=False)
        self.register_buffer("bias", self.linear.bias.detach())
        flat = torch.zeros(8)
        self.register_buffer("count", flat[:2])
        self.scale = nn.Parameter(flat[4:])
        self.register_buffer("nan", torch.full((2,), torch.nan), persistent=False)
        self.register_buffer("wide", torch.ones(1, 4).expand(3, 4), persistent=False)
        self.register_buffer("expanded", torch.zeros(1, 4).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += 1
        self.count.data += 1
        self.nan = torch.full((2,), torch.nan)
        self.expanded = (self.expanded[:1] + 1).expand(3, 4)
        return self.linear(x) + self.scale.mean()


def test_what_only_looks_changed_is_not_refused(job: perdure.Job) -> None:
    training = Training(job, Odd())
    model: Any = training.model
    validation = perdure.MicroBatches(Numbers(8), 4, 2)
    optimizer = training.optimizer
    for _ in training.after_its_loop(steps=3):
        optimizer.step()
        job.evaluate(lambda _: {"a": float(model(torch.ones(4, 12)).mean())}, validation)
    assert model.mean.tolist() == [6.0] * 4
    assert model.count.tolist() == [6.0] * 2
    assert model.expanded.tolist() == [[6.0] * 4] * 3
    assert model.bias.data_ptr() == model.linear.bias.data_ptr()


def test_a_statistic_may_be_taken_under_inference_mode_in_the_commit(job: perdure.Job) -> None:
    training = Training(job, nn.Sequential(nn.Linear(12, 4), Centre(), nn.Linear(4, 1)))
    for _ in training.after_its_loop(steps=2):
        with torch.inference_mode():
            training.model(torch.ones(4, 12))


@pytest.mark.parametrize("tied", ["still", "no more"])
def test_tied_buffers_stay_tied(job: perdure.Job, tied: str) -> None:
    model: Any = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[2].running_mean = model[1].running_mean

    def train() -> None:
        for _ in Training(job, model).after_its_loop(steps=2):
            model[1].running_mean = torch.zeros(4)
            if tied == "still":
                model[2].running_mean = model[1].running_mean

    if tied == "still":
        train()
        return
    with pytest.raises(
        ProtectError, match=r"model\.1\.running_mean and model\.2\.running_mean were one tensor .* two now"
    ):
        train()


class Counted(nn.Module):
    """Statistics whose bytes do not lie at multiples of the next one's element size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.float64))
        self.register_buffer("odd", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= True
        for buffer in (self.mean, self.scalar, self.odd, self.steps):
            buffer += 1
        return self.linear(x)


class Observer(nn.Module):
    """As those of quantisation, it gives its statistic memory when it sees the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.least.resize_(3).copy_(y.detach().amin(0))
        return y


@pytest.mark.parametrize("warm", [True, False])
def test_a_statistic_gets_its_memory_before_training(job: perdure.Job, warm: bool) -> None:
    training = Training(job, Observer())
    if warm:
        training.model(torch.ones(1, 12))
        training.loop(lambda step, loss: step.backward(loss))
        return
    with pytest.raises(ProtectError, match=r"least was .*\[0\] on cpu and is .*\[3\] .* pass before"):
        training.loop(lambda step, loss: step.backward(loss))


def test_statistics_of_any_size_are_committed(job: perdure.Job) -> None:
    training = Training(job, Counted())
    model: Any = training.model
    for step in training.after_its_loop(steps=2):
        count = 2.0 * (step.index + 1)
        assert model.seen.item()
        assert model.mean.tolist() == model.odd.tolist() == [count] * 3
        assert (model.scalar.item(), model.steps.item()) == (count, count)


def test_buffers_that_become_one_are_refused(job: perdure.Job) -> None:
    model: Any = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    steps = Training(job, model).after_its_loop(steps=2)
    next(steps)
    model[2].running_mean = model[1].running_mean
    with pytest.raises(
        ProtectError, match=r"model\.1\.running_mean and model\.2\.running_mean are one tensor now"
    ):
        next(steps)


def test_what_was_made_under_inference_mode_may_be_frozen(job: perdure.Job) -> None:
    with torch.inference_mode():
        features = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    job.protect(features=features)
    training, validation = Training(job), perdure.MicroBatches(Numbers(8), 4, 2)
    for _ in training.after_its_loop():
        job.evaluate(lambda batch: {"a": float(features(torch.ones(4, 12)).mean())}, validation)

"""What cannot work says so at once, with what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import perdure
from alone_job import Training
from perdure.schema.errors import ProtectError, UsageError
from perdure.state.shelf import read_manifest
from perdure.worker import api
from perdure.worker.api import EVALUATION_LOADERS_MAX
from tasks import Numbers

Batches = Callable[..., perdure.MicroBatches]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


# ── before the loop ─────────────────────────────────────────────────────────────────────────────────


def test_a_line_that_is_written_takes_no_more(job: perdure.Job) -> None:
    training = Training(job)
    kept: list[Any] = []

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        kept.append(step)

    training.loop(body)
    with pytest.raises(UsageError, match=r"step\.log: step 1 is committed and its line is written"):
        kept[-1].log(x=1)


def test_joining_twice(job: perdure.Job) -> None:
    with pytest.raises(UsageError, match="twice: keep the job that the first call returned"):
        perdure.join()


def test_a_seed_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_joined", None)
    with pytest.raises(UsageError, match="seed=True; expected an integer"):
        perdure.join(seed=True)


def test_what_cannot_be_protected(job: perdure.Job) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ProtectError, match=r"use an optimizer whose step\(\) takes no closure"):
        job.protect(optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ProtectError, match="it has no state_dict and load_state_dict; give it both"):
        job.protect(best=[1.0])
    job.protect(model=model)
    with pytest.raises(UsageError, match="model is protected already; use another name"):
        job.protect(model=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: perdure.MicroBatches(Stream(), 1, 2), "give a map-style dataset"),
        (lambda: perdure.MicroBatches(Numbers(), 4, 6, blocks=4), r"set blocks to one of \[1, 2, 3, 6\]"),
        (lambda: perdure.MicroBatches(Numbers(), 4, 100), "fewer than one step needs"),
    ],
)
def test_batches_that_cannot_be_dealt_out(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ProtectError, match=text):
        make()


def test_loops_that_are_none(job: perdure.Job) -> None:
    training = Training(job)
    with pytest.raises(UsageError, match=r"job\.steps before job\.protect"):
        job.steps(training.batches, until=1)
    job.protect(model=training.model)
    with pytest.raises(UsageError, match=r"expected a perdure\.MicroBatches, got list"):
        job.steps([], until=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="until=-1; expected a number of steps ≥ 0"):
        job.steps(training.batches, until=-1)
    job.steps(training.batches, until=1)
    with pytest.raises(UsageError, match="a job is one loop"):
        job.steps(training.batches, until=1)
    with pytest.raises(UsageError, match="protect everything before the loop"):
        job.protect(late=nn.Linear(1, 1))


def test_what_belongs_in_a_commit(job: perdure.Job) -> None:
    for call in (lambda: job.evaluate(len, Training(job).batches), lambda: job.save("x")):
        with pytest.raises(UsageError, match="between a step's loop and the next turn"):
            call()


# ── when it begins ──────────────────────────────────────────────────────────────────────────────────


def test_a_hook_of_ones_own_that_would_see_a_part_of_the_gradient(job: perdure.Job) -> None:
    training = Training(job)
    training.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ProtectError, match=r"model\.weight has a post-accumulate-grad hook of its own"):
        training.loop(lambda step, loss: step.backward(loss))


def test_sparse_embeddings(job: perdure.Job) -> None:
    model = nn.Sequential(nn.Linear(12, 1), nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ProtectError, match=r"model\.1 has sparse=True"):
        Training(job, model).loop(lambda step, loss: step.backward(loss))


def test_nothing_to_train(job: perdure.Job) -> None:
    model = nn.Linear(12, 1).requires_grad_(False)
    job.protect(model=model)
    with pytest.raises(ProtectError, match="none of the protected objects has a parameter"):
        next(iter(job.steps(Training(job).batches, until=1)))


# ── in a step ───────────────────────────────────────────────────────────────────────────────────────


def backward_of_its_own(step: Any, loss: torch.Tensor) -> None:
    loss.backward()


def backward_of_its_own_suppressed(step: Any, loss: torch.Tensor) -> None:
    with pytest.raises(ProtectError):
        loss.backward(retain_graph=True)
    step.backward(loss)


def skipped_and_used(step: Any, loss: torch.Tensor) -> None:
    step.skip()
    step.backward(loss)


def used_and_skipped(step: Any, loss: torch.Tensor) -> None:
    step.backward(loss)
    step.skip()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (backward_of_its_own, r"call step\.backward\(loss\) instead"),
        (backward_of_its_own_suppressed, "was refused, yet the script went on"),
        (lambda step, loss: None, r"neither given to step\.backward nor to step\.skip"),
        (skipped_and_used, "was skipped already"),
        (used_and_skipped, r"was given to step\.backward already"),
        (lambda step, loss: step.backward(loss.repeat(2)), r"the loss has shape \(2,\); expected a scalar"),
        (lambda step, loss: step.backward(loss, weight=-1), "weight=-1; expected a finite number"),
        (lambda step, loss: step.backward(1.0), "the loss is a float; expected a scalar tensor"),
        (lambda step, loss: step.backward(loss, weight="1"), "weight='1'; expected a finite number ≥ 0"),
        (
            lambda step, loss: step.backward(loss, scaler=torch.amp.GradScaler("cpu")),
            "this scaler is not protected; give job.protect it too",
        ),
        (lambda step, loss: step.log(x=2**70), "an integer of 71 bits; 64 are the most"),
        (lambda step, loss: step.log(x="\ud800"), "text with lone surrogates cannot be written"),
        (lambda step, loss: step.log(**{"\ud800": 1}), "text with lone surrogates cannot be written"),
        (lambda step, loss: step.log(x="x" * 70_000), "a text of 70000 characters; 65536 are the most"),
        (lambda step, loss: step.log(loss=1), "perdure writes loss itself; use another name"),
        (lambda step, loss: step.log(x=[1]), "expected a number, string, bool or None, got list"),
        (lambda step, loss: next(iter(step)), "is iterated twice"),
        (lambda step, loss: step.log(x=step.loss), "known after the loop over step 0: read it there"),
    ],
)  # fmt: skip
def test_what_a_step_refuses(body: Callable[[Any, torch.Tensor], None], text: str, job: perdure.Job) -> None:
    with pytest.raises(UsageError, match=text):
        Training(job).loop(body)


def test_backward_after_the_step(job: perdure.Job) -> None:
    training = Training(job)
    for step in training.after_its_loop():
        with pytest.raises(UsageError, match="for a micro-batch in hand"):
            step.backward(training.model(torch.ones(4, 12)).mean())


def test_leaving_a_step_before_its_end(job: perdure.Job) -> None:
    training = Training(job)
    job.protect(model=training.model, optimizer=training.optimizer)
    steps = iter(job.steps(training.batches, until=2))
    step = next(steps)
    for x, _, _ in step:
        step.backward(training.model(x).mean())
        break
    with pytest.raises(UsageError, match="left before its end: iterate it whole"):
        next(steps)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("file", "it is a file that is no checkpoint of perdure's; move it away, or give another path"),
        ("directory", "it is a directory that is no checkpoint of perdure's"),
        ("link", "it is a symbolic link"),
        ("below a file", "Not a directory"),
        ("root", "is no place for a checkpoint"),
    ],
)
def test_saving_where_something_else_is(kind: str, text: str, tmp_path: Path, job: perdure.Job) -> None:
    target = tmp_path / "here"
    if kind in ("file", "below a file"):
        target.write_text("mine")
    elif kind == "directory":
        target.mkdir()
        (target / "mine").touch()
    elif kind == "link":
        target.symlink_to(tmp_path)
    target = {"below a file": target / "x", "root": Path("/")}.get(kind, target)
    before = sorted(tmp_path.rglob("*"))
    training = Training(job)
    for _ in training.after_its_loop():
        with pytest.raises(UsageError, match=text):
            job.save(target)
    assert sorted(tmp_path.rglob("*")) == before
    assert kind != "file" or target.read_text() == "mine"


def test_saving_over_a_checkpoint_or_an_empty_directory(tmp_path: Path, job: perdure.Job) -> None:
    training = Training(job)
    job.protect(model=training.model, optimizer=training.optimizer)
    for step in job.steps(training.batches, until=2):
        for x, _, _ in step:
            step.backward(training.model(x).mean())
        for name in ("new", "empty"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            job.save(tmp_path / name)
            assert read_manifest(tmp_path / name).meta.step == step.index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]


def test_evaluations_that_do_not_add_up(job: perdure.Job) -> None:
    training = Training(job)
    names = iter("ab" * 100)
    job.protect(model=training.model, optimizer=training.optimizer)
    for step in job.steps(training.batches, until=1):
        for x, _, _ in step:
            step.backward(training.model(x).mean())
        assert step.loss == step.loss  # known now, and a number
        with pytest.raises(UsageError, match="make another MicroBatches for the evaluation"):
            job.evaluate(lambda _: {"a": 1.0}, training.batches)
        with pytest.raises(UsageError, match=r"expected a perdure\.MicroBatches, got list"):
            job.evaluate(lambda _: {"a": 1.0}, [])  # type: ignore[arg-type]
        other = perdure.MicroBatches(Numbers(8), 4, 2)
        with pytest.raises(UsageError, match="return the same names for all"):
            job.evaluate(lambda _: {next(names): 1.0}, other)
        with pytest.raises(UsageError, match="fn returned float; expected a dict of numbers"):
            job.evaluate(lambda _: 1.0, other)
        with pytest.raises(UsageError, match="fn returned the name 1; expected text"):
            job.evaluate(lambda _: {1: 1.0}, other)


def test_loader_processes_of_old_evaluations_are_ended(job: perdure.Job) -> None:
    """A script may make its MicroBatches anew each time."""
    training, before = Training(job), set(psutil.Process().children())
    for _ in training.after_its_loop():
        for _ in range(EVALUATION_LOADERS_MAX + 2):
            fresh = perdure.MicroBatches(Numbers(8), 4, 2, num_workers=1)
            assert job.evaluate(lambda _: {"a": 1.0}, fresh) == {"a": 1.0}
        assert len(set(psutil.Process().children()) - before) == EVALUATION_LOADERS_MAX
    assert set(psutil.Process().children()) <= before


# ── scalers ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_scaler_can_be_stepped_by_a_worker_that_has_scaled_no_loss(job: perdure.Job) -> None:
    """It computes no micro-batch when there are more workers than these, or when it has just joined."""
    training = Training(job)
    scaler = torch.amp.GradScaler("cpu")
    job.protect(model=training.model, optimizer=training.optimizer, scaler=scaler)
    state = scaler.state_dict()
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(iter(job.steps(training.batches, until=1)))
    scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)
    assert scaler.state_dict() == state


@pytest.mark.parametrize("where", ["in the module", "in both"])
def test_a_parameter_that_is_replaced_after_the_loop_began(job: perdure.Job, where: str) -> None:
    training = Training(job)
    assert isinstance(training.model, nn.Linear)

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        if step.index == 0 and step.micro_batch == 1:
            training.model.bias = nn.Parameter(torch.ones(1))
            if where == "in both":
                training.optimizer.param_groups[0]["params"][1] = training.model.bias

    with pytest.raises(ProtectError, match=r"than when job\.steps began \(1 new, [01] gone\)"):
        training.loop(body)


def test_a_parameter_that_was_frozen_when_the_loop_began(job: perdure.Job) -> None:
    training = Training(job)
    assert isinstance(training.model, nn.Linear)
    training.model.bias.requires_grad_(False)

    def body(step: Any, loss: torch.Tensor) -> None:
        step.backward(loss)
        training.model.bias.requires_grad_(True)

    with pytest.raises(ProtectError, match=r"^protected parameters require gradients now .*\(1\): .* freeze"):
        training.loop(body)


def test_a_parameter_may_be_frozen_for_a_time(job: perdure.Job) -> None:
    """What the refusal above advises."""
    training = Training(job)
    assert isinstance(training.model, nn.Linear)
    bias = training.model.bias
    before = bias.detach().clone()
    job.protect(model=training.model, optimizer=training.optimizer)
    for step in job.steps(training.batches, until=3):
        bias.requires_grad_(step.index == 2)
        for x, y, _ in step:
            step.backward((training.model(x) - y).square().mean())
        training.optimizer.step()
        training.optimizer.zero_grad()
        assert bias.equal(before) is (step.index < 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("module", "since job.steps began another module was put in the place of model.frozen: change"),
        ("parameter", r"have other parameters than when job\.steps began \(1 new, 1 gone\)"),
        ("pruning", r"model got other parameters or buffers \(2 new, 1 gone: model\.0\.weight\): have all"),
        ("group", r"optimizer has groups of \[2, 2\] parameters and had \[2\]: add every group before"),
    ],
)
def test_parts_that_a_script_started_anew_would_not_have(job: perdure.Job, change: str, text: str) -> None:
    """At once, not when a joiner or a later run cannot take the state."""
    training = Training(job, nn.Sequential(nn.Linear(12, 1)))
    model: Any = training.model
    model.frozen = nn.Linear(1, 1).requires_grad_(False)
    training.optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    steps = training.after_its_loop(steps=3)
    next(steps)
    if change == "module":
        model.frozen = copy.deepcopy(model.frozen)
    elif change == "parameter":
        model.frozen.weight = nn.Parameter(torch.ones(1, 1), requires_grad=False)
    elif change == "pruning":
        prune.random_unstructured(model[0], "weight", amount=0.5)
    else:
        training.optimizer.add_param_group({"params": list(model.frozen.parameters())})
    with pytest.raises(ProtectError, match=text):
        list(steps)


def test_a_parameter_that_comes_after_the_loop_began(job: perdure.Job) -> None:
    training = Training(job)

    def body(step: Any, loss: torch.Tensor) -> None:
        if step.index == 1:
            training.model.register_parameter("late", nn.Parameter(torch.ones(())))
        step.backward(loss)

    with pytest.raises(ProtectError, match=r"got other parameters or buffers \(1 new, 0 gone: model\.late\)"):
        training.loop(body)

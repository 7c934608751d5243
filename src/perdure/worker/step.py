"""One step as the user's loop sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from perdure.schema.errors import UsageError
from perdure.schema.messages import Scalar
from perdure.schema.plan import Entry
from perdure.worker.data import MicroBatches
from perdure.worker.loader import Loader
from perdure.worker.rng import seed_commit, seed_micro_batch
from perdure.worker.runtime import Runtime

TRIES_MAX = 3
"""So often a micro-batch comes whose backward fails while the script goes on (E4)."""

TEXT_MAX = 1 << 16
"""Characters of a text that is logged: it goes to every peer, and into a line of metrics.jsonl."""


class Step:
    """A step of `job.steps`: iterate it for this worker's micro-batches; then `.grad` is global.

    Attributes:
        index: the step, from 0.
        micro_batch: the number of the micro-batch in hand within the step.
        sample_ids: the data set indices of the micro-batch in hand.
    """

    def __init__(self, runtime: Runtime, loader: Loader, batches: MicroBatches, seed: int) -> None:
        self.index = runtime.member.committed + 1
        self.micro_batch = -1
        self.sample_ids: list[int] = []
        self._loss: float | None = None
        self.logged: dict[str, Scalar] = {}
        self.entered = False
        self.complete = False
        self.over = False
        self.evaluations = 0
        self._runtime = runtime
        self._loader = loader
        self._batches = batches
        self._seed = seed
        self._calls = 0
        self._weighted_loss = 0.0
        self._weight = 0.0
        self._skipped = False
        self._failed = False
        self._spoilt: Counter[int] = Counter()
        self._told_early = False

    def __iter__(self) -> Iterator[Any]:
        if self.entered:
            raise UsageError(f"step {self.index} is iterated twice; one loop over a step is the whole step")
        self.entered = True
        hooks, unchanged = self._runtime.training.hooks, self._runtime.training.unchanged
        self._runtime.training.bystanders.note()
        hooks.watched = unchanged.in_loop = True
        try:
            while (micro_batch := self._runtime.next_micro_batch()) is not None:
                yield self._begin(micro_batch)
                self._end()
            self.complete = True
        finally:
            hooks.watched = unchanged.in_loop = False
        self._loss = self._runtime.training.loss
        seed_commit(self._seed, self.index)

    @property
    def loss(self) -> float:
        """The weighted mean of the loss over the global batch, the same on all workers.

        Raises UsageError before the loop over this step has ended: until then nobody knows it.
        """
        if self._loss is None:
            raise UsageError(
                f"step.loss is known after the loop over step {self.index}: read it there; inside the loop "
                "use the loss that you give to step.backward"
            )
        return self._loss

    def _begin(self, micro_batch: int) -> Any:
        self.micro_batch = micro_batch
        self.sample_ids = self._batches.sample_ids(self.index, micro_batch)[1]
        batch = self._loader.get(self.index, micro_batch)
        self._calls, self._weighted_loss, self._weight = 0, 0.0, 0.0
        self._skipped = self._failed = self._told_early = False
        runtime, training = self._runtime, self._runtime.training
        early = None
        if runtime.last_in_queue() and not training.buffers.nbytes:
            early = lambda bucket: runtime.reducer.early(micro_batch, bucket)  # noqa: E731
        training.hooks.begin(early, training.leaves.incomplete)
        runtime.compute_begins(micro_batch, len(self.sample_ids))
        seed_micro_batch(self._seed, self.index, micro_batch)
        training.unchanged.note()
        return batch

    def _end(self) -> None:
        hooks, leaves = self._runtime.training.hooks, self._runtime.training.leaves
        gone = hooks.end()
        if hooks.stray:
            raise UsageError(
                f"{self._where}: loss.backward() was refused, yet the script went on; its gradient is in "
                ".grad now: call step.backward(loss) alone"
            )
        if self._failed:
            self._spoilt[self.micro_batch] += 1
            if self._spoilt[self.micro_batch] >= TRIES_MAX:
                raise UsageError(
                    f"{self._where} came {TRIES_MAX} times and step.backward failed each time: what a failed "
                    "one leaves is thrown away and the micro-batch comes again; let the error out, or call "
                    "step.skip() in its place"
                )
        if leaves.in_pieces(hooks.several) or self._failed:
            if gone or self._told_early:
                self._runtime.unfit()
            self._runtime.finish_micro_batch(Entry(self.micro_batch, 0.0, 0.0), void=True)
            return
        if not self._calls and not self._skipped:
            raise UsageError(f"{self._where} was neither given to step.backward nor to step.skip()")
        self._runtime.training.unchanged.check(self._where)
        if self._runtime.last_in_queue():  # before others learn of a state that differs
            self._runtime.training.bystanders.check(f"step {self.index}")
            self._runtime.training.buffers.check()
        if hooks.violated or (self._told_early and self._calls != 1):
            hooks.steady = False
            self._runtime.unfit()
        self._runtime.training.usual_calls = self._calls
        self._runtime.finish_micro_batch(self._entry(), void=False)

    @property
    def _where(self) -> str:
        return f"micro-batch {self.micro_batch} of step {self.index}"

    def _entry(self) -> Entry:
        runtime = self._runtime
        return Entry(
            self.micro_batch,
            self._weighted_loss,
            self._weight,
            math.isfinite(self._weighted_loss),
            runtime.member.worker,
            tuple(self.sample_ids) if runtime.log_samples else (),
        )

    def backward(self, loss: torch.Tensor, weight: float = 1, scaler: Any = None) -> None:
        """Add a loss of the micro-batch in hand to the step: the gradient is Σ weight·∇loss / Σ weight.

        Args:
            loss: a scalar, the mean over what `weight` counts.
            weight: for instance the number of tokens in the micro-batch.
            scaler: a protected GradScaler whose scale multiplies the loss.

        Raises:
            UsageError: outside the loop, or a loss, weight or scaler that cannot be.
        """
        if self.micro_batch < 0 or self.complete:
            raise UsageError("step.backward is for a micro-batch in hand: call it inside `for … in step`")
        if self._skipped:
            raise UsageError(f"micro-batch {self.micro_batch} was skipped already")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"step.backward: the loss is a {type(loss).__name__}; expected a scalar tensor")
        if loss.numel() != 1:
            raise UsageError(f"step.backward: the loss has shape {tuple(loss.shape)}; expected a scalar")
        try:
            sensible = math.isfinite(weight) and weight >= 0
        except (TypeError, ValueError):
            sensible = False
        if not sensible:
            raise UsageError(f"step.backward: weight={weight!r}; expected a finite number ≥ 0")
        if loss.is_floating_point() and weight > torch.finfo(loss.dtype).max:
            raise UsageError(
                f"step.backward: weight={weight!r} is more than the loss's {loss.dtype} can hold; make all "
                "weights smaller by the same factor"
            )
        if scaler is not None and not self._runtime.training.protects_scaler(scaler):
            raise UsageError("step.backward: this scaler is not protected; give job.protect it too")
        if not (
            self._failed or self._runtime.training.hooks.stray
        ):  # what follows from that comes at its end
            self._runtime.training.unchanged.check_gradients(self._where)
        self._calls += 1
        self._weighted_loss += float(loss.detach()) * float(weight)
        self._weight += float(weight)
        scaled = loss if weight == 1 else loss * weight
        if scaler is not None:
            scaled = scaler.scale(scaled)
        training = self._runtime.training
        usual = training.usual_calls == 1 and training.hooks.steady
        if self._calls == 1 and usual and self._runtime.last_in_queue():
            self._told_early = True
            self._runtime.entries_early(self._entry())
        training.hooks.allowed = True
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
            training.unchanged.backward_done()
        except BaseException:
            self._failed = True
            raise
        finally:
            training.hooks.allowed = False

    def skip(self) -> None:
        """Leave the micro-batch in hand out of the step."""
        if self._calls:
            raise UsageError(f"micro-batch {self.micro_batch} was given to step.backward already")
        self._skipped = True

    def log(self, **values: Any) -> None:
        """Add values to the step's line of metrics.jsonl; numbers, strings, booleans, None.

        Tensors and numpy's scalars of one element are taken as numbers; integers have up to 64 bits.

        Raises UsageError for other values, and once the loop has gone on to the next step.
        """
        if self.over:
            raise UsageError(
                f"step.log: step {self.index} is committed and its line is written; log in the loop's body"
            )
        for name, value in values.items():
            if (isinstance(value, torch.Tensor) and value.numel() == 1) or isinstance(value, np.generic):
                value = value.item()
            if value is not None and not isinstance(value, bool | int | float | str):
                kind = type(value).__name__
                raise UsageError(f"step.log({name}=…): expected a number, string, bool or None, got {kind}")
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise UsageError(
                    f"step.log({name}=…): an integer of {value.bit_length()} bits; 64 are the most"
                )
            if isinstance(value, str) and len(value) > TEXT_MAX:
                raise UsageError(
                    f"step.log({name}=…): a text of {len(value)} characters; {TEXT_MAX} are the most"
                )
            if not is_text(name) or (isinstance(value, str) and not is_text(value)):
                raise UsageError(
                    f"step.log({name!a}=…): text with lone surrogates cannot be written as UTF-8"
                )
            if name in ("step", "loss", "digest", "time", "workers"):
                raise UsageError(f"step.log({name}=…): perdure writes {name} itself; use another name")
            self.logged[name] = value


def is_text(text: str) -> bool:
    """Whether it can be written: file names that are not UTF-8 come with surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

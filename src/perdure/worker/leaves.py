"""Gradients of micro-batches, kept by one worker until the step is committed.

A run of micro-batches is folded where plain PyTorch would fold it: its gradients accumulate in `.grad`.
Between two runs `.grad` is re-bound, so that each run (and each single leaf) has tensors of its own. The
first gradient of a run is whatever autograd leaves in `.grad`: it is never added to zeros (E1).

A parameter whose gradient comes in several pieces per micro-batch (several calls of backward, re-entrant
checkpointing of a tied weight) is folded here instead: autograd would add the pieces one by one to the run,
and sum + (a + b), what a leaf of its own contributes, has other bits than (sum + a) + b.

Of a job that is not exact all runs of a step are one: a pile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from perdure.schema.errors import ProtectError
from perdure.schema.plan import Run

Gradients = list[torch.Tensor | None]


class Leaves:
    """The runs of the step in progress, by their first micro-batch."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str], exact: bool = True) -> None:
        self.parameters = list(parameters)
        self._exact = exact
        self._names = list(names)
        self._runs: dict[int, Gradients] = {}
        self._bound: int | None = None
        self._apart: set[int] = set()

    @property
    def incomplete(self) -> frozenset[int]:
        """The parameters whose `.grad` is not the whole run's while autograd works on it."""
        return frozenset(self._apart) if self._bound in self._runs else frozenset()

    def bind(self, first: int) -> None:
        """Let autograd accumulate into the run that starts at `first` (new, or going on)."""
        key = self._key(first)
        gradients = self._runs.get(key)
        for index, parameter in enumerate(self.parameters):
            apart = gradients is None or index in self._apart
            parameter.grad = None if apart or gradients is None else gradients[index]
        self._bound = key

    def _key(self, first: int) -> int:
        return first if self._exact else 0

    def in_pieces(self, parameters: set[int]) -> bool:
        """These parameters' gradients came in pieces; true if that spoilt the run that they extend."""
        new = parameters - self._apart
        self._apart |= parameters
        return bool(new) and self._bound in self._runs

    def capture(self) -> None:
        """Take what autograd left in `.grad` as the run's gradients."""
        assert self._bound is not None
        gradients = [parameter.grad for parameter in self.parameters]
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ProtectError(
                    f"the gradient of {name} is sparse; perdure sums dense gradients only: "
                    "use sparse=False in the embedding"
                )
        for index in self.incomplete:
            gradients[index] = _added(self._runs[self._bound][index], gradients[index])
        self._runs[self._bound] = gradients

    def get(self, first: int) -> Gradients:
        """The gradients of a run."""
        return self._runs[self._key(first)]

    def keep(self, held: Sequence[Run]) -> None:
        """Drop the runs that are not in `held`."""
        firsts = {self._key(run.first) for run in held}
        self._runs = {first: gradients for first, gradients in self._runs.items() if first in firsts}

    def clear(self) -> None:
        """The step is committed (or void): let all go. What autograd is at work on may still be captured."""
        self._runs.clear()


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in the memory of `total`; an absent gradient is skipped (E1)."""
    if total is None or gradient is None:
        return total if gradient is None else gradient
    with torch.no_grad():
        return total.add_(gradient)


class Hooks:
    """Sees each parameter's gradient become final under the last backward of a step, bucket by bucket.

    A bucket goes early only if its parameters' hooks fired as often as in the micro-batch before; a hook
    that fires once more after its bucket went makes the attempt void (E3). The hooks themselves only
    count and enqueue (E4), except for one thing: a backward that the step was not told of raises at once.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], bucket_of: Sequence[int], buckets: int) -> None:
        self._bucket_of = list(bucket_of)
        self._buckets = buckets
        self._fired = [0] * len(parameters)
        self._expected: list[int] | None = None
        self._waiting = [0] * buckets
        self._gone = [False] * buckets
        self._early: Callable[[int], None] | None = None
        self.allowed = False
        self.watched = False
        self.violated = False
        self.stray = False
        self.steady = True
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[index]

        def fired(_: torch.Tensor) -> None:
            if not self.allowed:
                if self.watched:
                    self.stray = True
                    raise ProtectError(
                        "loss.backward() inside a step does not reach the other workers: "
                        "call step.backward(loss) instead"
                    )
                return
            self._fired[index] += 1
            if self._early is None or self._expected is None:
                return
            if self._gone[bucket]:
                self.violated = True
            elif self._fired[index] == self._expected[index]:
                self._waiting[bucket] -= 1
                if self._waiting[bucket] == 0:
                    self._gone[bucket] = True
                    self._early(bucket)

        return fired

    @property
    def several(self) -> set[int]:
        """The parameters whose gradient came in more than one piece in this micro-batch."""
        return {index for index, count in enumerate(self._fired) if count > 1}

    def begin(self, early: Callable[[int], None] | None, late: frozenset[int] = frozenset()) -> None:
        """A micro-batch starts; `early(bucket)` is called when a bucket is final, if that can be known.

        The buckets of the parameters in `late` wait for the micro-batch's end.
        """
        self._fired = [0] * len(self._fired)
        self._gone = [False] * self._buckets
        self._early = early if self.steady else None
        self.violated = self.stray = False
        if self._early is not None and self._expected is not None:
            self._waiting = [0] * self._buckets
            for index, count in enumerate(self._expected):
                if count:
                    self._waiting[self._bucket_of[index]] += 1
            for index in late:
                self._waiting[self._bucket_of[index]] += 1

    def end(self) -> set[int]:
        """The micro-batch is over: remember how the hooks fired; the buckets that went early."""
        gone = {bucket for bucket, went in enumerate(self._gone) if went and self._early is not None}
        if self._early is not None and self._expected is not None and not self.violated:
            # A bucket that went early while one of its parameters fired less often elsewhere is unharmed;
            # one whose parameter had not been expected at all is not.
            for index, count in enumerate(self._fired):
                if count > self._expected[index] and self._gone[self._bucket_of[index]]:
                    self.violated = True
        if self.violated:
            self.steady = False
        self._expected = list(self._fired)
        self._early = None
        return gone

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

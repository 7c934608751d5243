"""Whether something else than `step.backward` changed gradients or parameters during a micro-batch.

What plain loops do at each batch (`zero_grad`, clipping, `optimizer.step`) belongs after the loop over the
step here: inside it a gradient is a part of a sum that other workers go on with, and may be on its way to
them already. torch counts the changes of each tensor; that says so, at the cost of a comparison. It does not
count what goes through `.data`, nor what fused optimizers do: an optimizer is asked itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from operator import and_, eq, is_

import numpy as np
import torch

from perdure.schema.errors import UsageError
from perdure.state.layout import canonical
from perdure.state.tree import encode
from perdure.worker.buffers import Mark, Place, count

AROUND = "that belongs before or after the loop over the step"
FROM_DEFAULTS = (
    "random numbers there come from the default generators of torch, numpy and random, which are seeded for "
    "each micro-batch; one of your own is for what comes before or after the loop"
)
AFTER = "that belongs after the loop over the step, where .grad is the sum over all workers"


class Unchanged:
    """What the parameters and their `.grad` were when it was looked at last.

    While a step's loop is at work `in_loop` is set, and the steps of `optimizers` raise UsageError.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.in_loop = False
        # Inference tensors have no count, and cannot be changed where training goes on.
        watched = {name: tensor for name, tensor in parameters.items() if not tensor.is_inference()}
        self._parameters = list(watched.values())
        self._names = list(watched)
        self._handles = [optimizer.register_step_pre_hook(self._refuse) for optimizer in optimizers]
        self._values: list[int] = []
        self._gradients: list[torch.Tensor | None] = []
        self._counts: list[int] = []

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.in_loop:
            raise UsageError(f"{type(optimizer).__name__}.step() inside `for … in step`: {AFTER}")

    def note(self) -> None:
        """A micro-batch is in hand: from here on only `step.backward` changes anything."""
        self._values = [parameter._version for parameter in self._parameters]
        self.backward_done()

    def backward_done(self) -> None:
        """`step.backward` has changed gradients."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._counts = _counts(self._gradients)

    def check_gradients(self, where: str) -> None:
        """Raises UsageError if a gradient is not what it was."""
        now = [parameter.grad for parameter in self._parameters]
        same, counts = [*map(is_, now, self._gradients)], _counts(now)
        if not all(same) or counts != self._counts:
            name = self._names[[*map(and_, same, map(eq, counts, self._counts))].index(False)]
            raise UsageError(
                f"{where}: the gradient of {name} was changed inside `for … in step` (zero_grad, clipping, "
                f"unscale_?): {AFTER}"
            )

    def check(self, where: str) -> None:
        """The micro-batch is through. Raises UsageError if a parameter or gradient is not what it was."""
        values = [parameter._version for parameter in self._parameters]
        if values != self._values:
            changed = [*map(eq, values, self._values)].index(False)
            raise UsageError(
                f"{where}: the parameter {self._names[changed]} was changed inside `for … in step` "
                f"(load_state_dict, a forward that writes to it, as Embedding(max_norm=…) does?): {AFTER}"
            )
        self.check_gradients(where)
        self._gradients = []  # they may be let go


def _counts(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    return [-1 if gradient is None else gradient._version for gradient in gradients]


KINDS = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.Generator,
    random.Random,
    np.random.Generator,
)


class Bystanders:
    """Protected things that only what comes before and after a step's loop may change.

    Learning rates, schedulers, generators, and buffers of modules of which no parameter is trained (`still`):
    changed inside the loop they would count the micro-batches of one worker. Other objects are not compared:
    what their state holds is not known.
    """

    def __init__(self, objects: Mapping[str, object], still: Sequence[Place]) -> None:
        self._still = list(still)
        watched = [(name, thing) for name, thing in objects.items() if isinstance(thing, KINDS)]
        # Optimizers last: a scheduler that is told of is told of by its own name.
        watched.sort(key=lambda pair: isinstance(pair[1], torch.optim.Optimizer))
        self._things = dict(watched)
        self._buffers: list[Mark] = []
        self._values: dict[str, bytes] = {}

    def note(self) -> None:
        """The loop over a step begins."""
        self._buffers = [Mark(place.now) for place in self._still]
        self._values = {name: _value(name, thing) for name, thing in self._things.items()}

    def check(self, where: str) -> None:
        """This worker's part of the loop is done, as far as is known. Raises UsageError after a change."""
        for place, mark in zip(self._still, self._buffers, strict=True):
            if not mark.fits(place.now):
                raise UsageError(
                    f"{where}: a forward inside `for … in step` changed the buffer {place.name}, of a module "
                    "of which no parameter is trained: call its eval(), or protect it and the trained model "
                    "as one nn.ModuleList"
                )
        for name, thing in self._things.items():
            if _value(name, thing) != self._values[name]:
                kind = type(thing).__name__
                instead = FROM_DEFAULTS if kind in ("Generator", "Random") else AROUND
                raise UsageError(
                    f"{where}: {name} ({kind}) was changed inside `for … in step`, where each worker has "
                    f"micro-batches of its own: {instead}"
                )


def _value(name: str, thing: object) -> bytes:
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if isinstance(thing, torch.optim.Optimizer):
        state: object = [{k: v for k, v in group.items() if k != "params"} for group in thing.param_groups]
    elif isinstance(thing, random.Random):
        state = thing.getstate()
    elif isinstance(thing, np.random.Generator):
        state = dict(thing.bit_generator.state)
    else:
        assert isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        state = thing.state_dict()
    return canonical({name: encode(state, name, _rate)})


def _rate(_: str, tensor: torch.Tensor) -> dict[str, str]:
    """A learning rate may be a tensor, written into or replaced; one on a device is not waited for."""
    value = tensor.item() if tensor.numel() == 1 and tensor.device.type == "cpu" else ""
    return {"tensor": f"{count(tensor)} {value!r}"}

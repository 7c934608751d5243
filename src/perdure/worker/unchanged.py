"""Whether something else than `step.backward` changed gradients or parameters during a micro-batch.

What plain loops do at each batch (`zero_grad`, clipping, `optimizer.step`) belongs after the loop over the
step here: inside it a gradient is a part of a sum that other workers go on with, and may be on its way to
them already. torch counts the changes of each tensor; that says so, at the cost of a comparison. It does not
count what goes through `.data`, nor what fused optimizers do: an optimizer is asked itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import and_, eq, is_

import torch

from perdure.schema.errors import UsageError

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
        self._parameters = list(parameters.values())
        self._names = list(parameters)
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

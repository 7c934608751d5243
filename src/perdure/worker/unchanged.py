"""Whether something else than `step.backward` changed gradients or parameters during a micro-batch.

What plain loops do at each batch (`zero_grad`, clipping, `optimizer.step`) belongs after the loop over the
step here: inside it a gradient is a part of a sum that other workers go on with, and may be on its way to
them already. torch counts the changes of each tensor; that says so, at the cost of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perdure.schema.errors import UsageError

AFTER = "that belongs after the loop over the step, where .grad is the sum over all workers"


class Unchanged:
    """What the parameters and their `.grad` were when it was looked at last."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._values: list[int] = []
        self._gradients: list[torch.Tensor | None] = []
        self._counts: list[int] = []

    def note(self) -> None:
        """A micro-batch is in hand: from here on only `step.backward` changes anything."""
        self._values = [parameter._version for parameter in self._parameters]
        self.backward_done()

    def backward_done(self) -> None:
        """`step.backward` has changed gradients."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._counts = [-1 if gradient is None else gradient._version for gradient in self._gradients]

    def check_gradients(self, where: str) -> None:
        """Raises UsageError if a gradient is not what it was."""
        found = zip(self._parameters, self._gradients, self._counts, self._names, strict=True)
        for parameter, gradient, count, name in found:
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != count):
                raise UsageError(
                    f"{where}: the gradient of {name} was changed inside `for … in step` (zero_grad, "
                    f"clipping, unscale_?): {AFTER}"
                )

    def check(self, where: str) -> None:
        """The micro-batch is through. Raises UsageError if a parameter or gradient is not what it was."""
        for parameter, value, name in zip(self._parameters, self._values, self._names, strict=True):
            if parameter._version != value:
                raise UsageError(
                    f"{where}: the parameter {name} was changed inside `for … in step` (optimizer.step, "
                    f"load_state_dict, a forward that writes to it, as Embedding(max_norm=…) does?): {AFTER}"
                )
        self.check_gradients(where)
        self._gradients = []  # they may be let go

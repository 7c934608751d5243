"""The writing pass over a protected state: plan everything, then write."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from perdure.schema.errors import RestoreError
from perdure.state.layout import Description, TensorSpec
from perdure.state.memory import flat_bytes, is_dense, typed


class Restoration:
    """What has to be written to make the live objects equal to a saved state: planned first, then applied.

    `source` gives the bytes of each entry as a flat uint8 CPU tensor. With `adopt`, tensors that have to be
    created on the CPU take the source's memory over instead of copying it. `evaluating` are the modules that
    are to be in evaluation mode, as `Description` has them. What has `moved` gets memory of its own: that
    which it has here the script may know by another name.
    """

    def __init__(self, description: Description, source: Mapping[str, torch.Tensor], adopt: bool) -> None:
        self._specs = description.specs()
        names = description.evaluating
        self.evaluating = None if names is None else frozenset(names)
        self.moved = frozenset(description.moved)
        self._source = source
        self._adopt = adopt
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._written: set[tuple[int, str]] = set()
        self._steps: list[Callable[[], None]] = []

    def spec(self, name: object) -> TensorSpec:
        """The spec of an entry. Raises `RestoreError` if the saved state has none of that name."""
        spec = self._specs.get(name) if isinstance(name, str) else None
        if spec is None:
            raise RestoreError(f"the saved state refers to an entry {name!r} that it does not hold")
        return spec

    def later(self, step: Callable[[], None]) -> None:
        """Do this once every object has been checked."""
        self._steps.append(step)

    def apply(self) -> None:
        """Write everything that was planned."""
        for step in self._steps:
            step()

    def into(self, where: str, live: torch.Tensor, name: object) -> None:
        """Plan to overwrite a live parameter or buffer, which keeps its identity.

        Raises `RestoreError` if it differs in form.
        """
        spec = self.spec(name)
        if tuple(live.shape) != spec.shape or dtype_name(live) != spec.dtype:
            raise RestoreError(
                f"{where} was saved as {spec.dtype}{list(spec.shape)} but is "
                f"{dtype_name(live)}{list(live.shape)} here; "
                "run the script that the state comes from, or start anew"
            )
        self.later(lambda: self.overwrite(live, spec))

    def overwrite(self, live: torch.Tensor, spec: TensorSpec) -> None:
        """Give the live tensor the entry's bytes, in place.

        Its memory is replaced if it has moved, and where the order in it differs.
        """
        key = (id(live), spec.name)
        if key in self._written:  # a module's parameter, met again as the optimizer's
            return
        self._written.add(key)
        stride = live.stride()
        if spec.name in self.moved:
            live.data = self.make(spec, live.device)
        elif same_order(live, spec):
            target = flat_bytes(live)
            source = self._source[spec.name]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        elif 0 in stride or is_dense(tuple(live.shape), stride):
            live.data = self.make(spec, live.device)
        else:  # a view with holes: what lies in the holes is somebody else's
            live.detach().copy_(typed(self._source[spec.name], spec))

    def make(self, spec: TensorSpec, device: torch.device, own: bool = False) -> torch.Tensor:
        """A new tensor with the entry's bytes; the same one when asked again, so that ties stay ties.

        `own`: it begins where its storage begins, as a tensor that torch has made does. Code of others may
        take that for granted: `Generator.set_state` reads from there, `torch.save` writes all of it.
        """
        key = (spec.name, device)
        if key not in self._made:
            source = self._source[spec.name]
            if device.type != "cpu":
                source = source.to(device)
            elif own or not self._adopt:
                source = source.clone()
            self._made[key] = typed(source, spec)
        made = self._made[key]
        return made.clone() if own and made.storage_offset() else made


def dtype_name(tensor: torch.Tensor) -> str:
    """ "float32" for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def same_order(live: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor's elements lie in memory as the entry's do."""
    return live.is_contiguous() if not spec.stride else tuple(live.stride()) == spec.stride

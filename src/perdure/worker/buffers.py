"""Module buffers that forward passes change: running statistics, power iterations (E8).

The micro-batches of block 0 are computed in order by one worker, from the committed values; the values that
they leave are the next committed ones and travel to everybody as one more span of the step. Each other
micro-batch is computed from the committed values, and its changes are dropped. Buffers outside the
state_dict are taken to be constant, which is checked.

A forward pass may write into a buffer or replace it (`self.mean = …`): a slot of a module is watched, not a
tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from perdure.schema.errors import ProtectError

LARGE_BYTES = 1 << 18
"""Larger buffers than this are no running statistics, which torch changes without counting it."""


@dataclass(eq=False)
class Slot:
    """One buffer of a module. `home` is the tensor that holds it between steps.

    `version` is torch's count of the changes to `home` when it was put back last.
    """

    name: str
    module: nn.Module
    key: str
    home: torch.Tensor
    version: int = -1

    @property
    def persistent(self) -> bool:
        """Whether it is in the state_dict."""
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def live(self) -> torch.Tensor:
        """What is there now. Raises ProtectError if it cannot stand for what was there."""
        live = self.module._buffers[self.key]
        if live is None or (live.shape, live.dtype) != (self.home.shape, self.home.dtype):
            now = "None" if live is None else f"{live.dtype}{list(live.shape)}"
            raise ProtectError(
                f"the buffer {self.name} was {self.home.dtype}{list(self.home.shape)} and is {now} now: "
                "what is in the state_dict keeps its form; register what changes it with persistent=False"
            )
        return live

    @property
    def keeps_value(self) -> bool:
        """Whether what is there now is the home, or as good."""
        live = self.module._buffers[self.key]
        return live is self.home or (live is not None and torch.equal(live, self.home))

    def put(self, value: torch.Tensor) -> None:
        """Let it have this value, in its home."""
        self.home.copy_(value)
        self.module._buffers[self.key] = self.home
        self.version = self.home._version

    @property
    def is_as_put(self) -> bool:
        """Whether nothing has happened to it since it was put back, as far as torch counts."""
        return self.module._buffers[self.key] is self.home and self.home._version == self.version


class Buffers:
    """The changing buffers of the protected modules; `slots` has each tensor once."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._changing = [slot for slot in slots if slot.persistent]
        self._constant = [slot for slot in slots if not slot.persistent]
        self._versions: list[int] = []
        self.nbytes = sum(slot.home.nbytes for slot in self._changing)
        self._committed: list[torch.Tensor] = []
        self._left: torch.Tensor | None = None
        self.note_restored()

    def note_committed(self) -> None:
        """A step was committed: the live values are the committed ones now."""
        self.note_restored()
        self._left = None

    def note_restored(self) -> None:
        """The state was taken from elsewhere; block 0's values of the next step may be here already."""
        for slot in self._changing:
            slot.home = slot.live
        self._committed = [slot.home.detach().clone() for slot in self._changing]
        for slot in self._constant:
            live = slot.module._buffers[slot.key]
            slot.home = slot.home if live is None else live
        self._versions = [slot.home._version for slot in self._constant]

    def put_back(self, again: bool = False) -> None:
        """Make the live values the committed ones; `again`: they were so a micro-batch ago.

        Then large ones (a mask) are left alone unless something was done to them.
        """
        with torch.no_grad():
            for slot, value in zip(self._changing, self._committed, strict=True):
                if not (again and slot.home.nbytes > LARGE_BYTES and slot.is_as_put):
                    slot.put(value)

    def committed(self) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
        """(id of the module, key) of each buffer → its home and its committed value."""
        return {
            (id(slot.module), slot.key): (slot.home, value)
            for slot, value in zip(self._changing, self._committed, strict=True)
        }

    def block_0_ended(self) -> torch.Tensor:
        """Block 0's run is computed: its values (flat bytes) become the committed ones with the step."""
        live = [slot.live.detach() for slot in self._changing]
        flat = [tensor.contiguous().view(-1).view(torch.uint8).cpu() for tensor in live]
        self._left = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        return self._left

    def landing(self) -> torch.Tensor:
        """Where block 0's values are received (flat bytes)."""
        if self._left is None:
            self._left = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._left

    @property
    def left(self) -> torch.Tensor | None:
        """Block 0's values, if they are here."""
        return self._left

    def apply(self) -> None:
        """Commit: the live values are those that block 0 left."""
        if self._left is None:
            return
        offset = 0
        with torch.no_grad():
            for slot in self._changing:
                home = slot.home
                piece = self._left[offset : offset + home.nbytes]
                slot.put(piece.view(home.dtype).view(home.shape) if piece.numel() else home)
                offset += home.nbytes

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """What forward passes change meanwhile is put back."""
        found = [(slot, slot.live) for slot in self._changing]
        values = [live.detach().clone() for _, live in found]
        try:
            yield
        finally:
            with torch.no_grad():
                for (slot, live), value in zip(found, values, strict=True):
                    live.copy_(value)
                    slot.module._buffers[slot.key] = live

    def check(self) -> None:
        """Raise if a forward pass changed a buffer that is not in the state_dict."""
        for slot, version in zip(self._constant, self._versions, strict=True):
            if slot.home._version != version or not slot.keeps_value:
                raise ProtectError(
                    f"the forward pass changed the buffer {slot.name}, which is not in the state_dict, so it "
                    "would differ between workers: register it with persistent=True, or keep what is only a "
                    "cache in a plain attribute"
                )

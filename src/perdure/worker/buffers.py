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
from dataclasses import dataclass, field

import torch
from torch import nn

from perdure.schema.errors import ProtectError


@dataclass(eq=False)
class Slot:
    """One buffer of a module. `home` is the tensor that holds it between steps.

    `form` is what it has to keep, `version` torch's count of the changes to `home` when that was noted last.
    """

    name: str
    module: nn.Module
    key: str
    home: torch.Tensor
    version: int = -1
    form: tuple[torch.Size, torch.dtype, torch.device] = field(init=False)

    def __post_init__(self) -> None:
        self.form = form_of(self.home)

    def settle(self, home: torch.Tensor) -> None:
        """What is there now is what a step begins with."""
        self.home, self.version = home, count(home)

    @property
    def persistent(self) -> bool:
        """Whether it is in the state_dict."""
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def live(self) -> torch.Tensor:
        """What is there now. Raises ProtectError if it cannot stand for what was there."""
        live = self.now
        if live is None or form_of(live) != self.form:
            shape, dtype, device = self.form
            now = "nothing" if live is None else f"{live.dtype}{list(live.shape)} on {live.device}"
            raise ProtectError(
                f"the buffer {self.name} was {dtype}{list(shape)} on {device} and is {now} now: "
                "what is in the state_dict keeps its form once job.steps has begun"
            )
        return live

    @property
    def now(self) -> torch.Tensor | None:
        """What is there now, whatever it is."""
        return self.module._buffers.get(self.key)

    @property
    def is_as_noted(self) -> bool:
        """Whether what is there now is the home, not written into as far as torch counts, or as good."""
        return same(self.now, self.home, self.version)

    def put(self, value: torch.Tensor) -> None:
        """Let it have this value, in its home."""
        self.home.copy_(value)
        self.module._buffers[self.key] = self.home


class Buffers:
    """The changing buffers of the modules that are trained; `still` are those of the others."""

    def __init__(self, slots: Sequence[Slot], still: Sequence[Slot] = ()) -> None:
        self._changing = [slot for slot in slots if slot.persistent]
        self._constant = [slot for slot in slots if not slot.persistent]
        self._still = [slot for slot in still if slot.persistent]
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
            slot.settle(slot.live)
        self._committed = [slot.home.detach().clone() for slot in self._changing]
        for slot in self._constant:
            now = slot.now
            slot.settle(slot.home if now is None else now)
            slot.form = form_of(slot.home)

    def put_back(self) -> None:
        """Make the live values the committed ones."""
        with torch.no_grad():
            for slot, value in zip(self._changing, self._committed, strict=True):
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
        """What forward passes change meanwhile is put back, in modules that are not trained too."""
        found = [(slot, slot.now) for slot in (*self._changing, *self._constant, *self._still)]
        kept = [(slot, live, live.detach().clone()) for slot, live in found if live is not None]
        counts = [(slot, count(slot.home)) for slot in self._constant]
        try:
            yield
        finally:
            with torch.no_grad():
                for slot, live, value in kept:
                    with torch.inference_mode(live.is_inference()):
                        live.copy_(value)
                    slot.module._buffers[slot.key] = live
            for slot, before in counts:
                if slot.version == before:
                    slot.version = count(slot.home)  # that it was put back is no change

    def check(self, in_commit: bool = False) -> None:
        """Raise if a buffer that is not in the state_dict is not what it was when the step began.

        The commit, which all workers run alike, may put another one of its form there.
        """
        for slot in self._constant:
            new = slot.now
            may = in_commit and new is not None and new is not slot.home and form_of(new) == slot.form
            if not (may or slot.is_as_noted):
                raise ProtectError(
                    f"the buffer {slot.name} was changed in a step (by a forward pass?), and is not in the "
                    "state_dict, so it would differ between workers: register it with persistent=True; let a "
                    "cache that grows be as long as it gets, by one forward pass, before job.steps begins"
                )


def form_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What a buffer keeps."""
    return tensor.shape, tensor.dtype, tensor.device


def count(tensor: torch.Tensor | None) -> int:
    """How often it was written into, as far as torch counts; it does not for inference tensors."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def same(now: torch.Tensor | None, before: torch.Tensor | None, version: int) -> bool:
    """Whether a buffer is what it was, of this version, or another tensor of the same form and values."""
    if count(before) != version or now is None or before is None:
        return now is before and count(before) == version
    if now is before:
        return True
    with torch.no_grad():
        return form_of(now) == form_of(before) and torch.equal(now, before)

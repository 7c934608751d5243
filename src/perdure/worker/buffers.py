"""Module buffers that forward passes change: running statistics, power iterations (E8).

The micro-batches of block 0 are computed in order by one worker, from the committed values; the values that
they leave are the next committed ones and travel to everybody as one more span of the step. Each other
micro-batch is computed from the committed values, and its changes are dropped. Buffers outside the
state_dict are taken to be constant, which is checked.

A forward pass may write into a buffer or replace it (`self.mean = …`): a place in a module is watched, not a
tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from perdure.schema.errors import ProtectError


class Mark:
    """What a buffer was at some time.

    torch counts the changes to a tensor; where something else lies in the same memory (`beside`) it counts
    those to that too, and the value is kept instead.
    """

    def __init__(self, tensor: torch.Tensor | None, beside: bool = False) -> None:
        self.tensor = tensor
        self._version = count(tensor)
        self._value = tensor.detach().clone() if beside and tensor is not None else None

    def fits(self, now: torch.Tensor | None) -> bool:
        """Whether a buffer is what it was, or another tensor of the same form and values."""
        if self._value is not None:
            return now is not None and _alike(now, self._value)
        if now is None or self.tensor is None or count(self.tensor) != self._version:
            return now is self.tensor and count(now) == self._version
        return now is self.tensor or _alike(now, self.tensor)


@dataclass(eq=False)
class Place:
    """A buffer of a module: what is there, and what was when it was noted last."""

    name: str
    module: nn.Module
    key: str
    noted: Mark = field(init=False)

    def __post_init__(self) -> None:
        self.note()

    def note(self, beside: bool = False) -> None:
        """What is there now is what a step begins with."""
        self.noted = Mark(self.now, beside)

    @property
    def now(self) -> torch.Tensor | None:
        """What is there now, whatever it is."""
        return self.module._buffers.get(self.key)

    def put(self, tensor: torch.Tensor) -> None:
        """Let this be there."""
        self.module._buffers[self.key] = tensor

    @property
    def persistent(self) -> bool:
        """Whether it is in the state_dict."""
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def has_grown(self) -> bool:
        """Whether what is there now has another form than what was noted."""
        now, before = self.now, self.noted.tensor
        return now is None or (before is not None and form_of(now) != form_of(before))


class Slot:
    """A buffer of the state_dict that forward passes may change, in one place or several (tied).

    `home` holds it between steps.
    """

    def __init__(self, places: Sequence[Place], home: torch.Tensor) -> None:
        self.places = places
        self.name = places[0].name
        self.form = form_of(home)
        self._take(home)

    def settle(self) -> None:
        """What is there now is what a step begins with. Raises ProtectError as `live` does."""
        if (live := self.live) is not self.home:
            self._take(live)

    def _take(self, home: torch.Tensor) -> None:
        if home.is_inference() or is_expanded(home):
            home = home.clone()  # nothing can be written into the other
        self.home = home
        for place in self.places:
            place.put(home)

    @property
    def live(self) -> torch.Tensor:
        """What is there now. Raises ProtectError if it cannot stand for what was there."""
        live = self.places[0].now
        for other in self.places[1:]:
            if other.now is not live:
                raise ProtectError(
                    f"the buffers {self.name} and {other.name} were one tensor when job.steps began and are "
                    "two now: give both the same one, or each its own before job.steps"
                )
        if live is None or form_of(live) != self.form:
            raise ProtectError(self._changed(live))
        return live

    def _changed(self, live: torch.Tensor | None) -> str:
        shape, dtype, device = self.form
        now = "nothing" if live is None else f"{live.dtype}{list(live.shape)} on {live.device}"
        return (
            f"the buffer {self.name} was {dtype}{list(shape)} on {device} and is {now} now: what is in the "
            "state_dict keeps its form once job.steps has begun; let one forward pass before that make what "
            "is made lazily"
        )

    def put(self, value: torch.Tensor) -> None:
        """Let it have this value, in its home. Raises ProtectError as `live` does."""
        try:
            self.home.copy_(value)
        except RuntimeError:  # it may have been given another size
            if form_of(self.home) == self.form:
                raise
            raise ProtectError(self._changed(self.home)) from None
        for place in self.places:
            place.put(self.home)


class Buffers:
    """The buffers of the protected modules.

    Those in the state_dict of `trained` modules may change in forward passes. All others (caches, masks, what
    is None) are constant, but for the commit, which all workers run alike; `still` are those of modules
    without a parameter to train, which `Bystanders` watches in the loop.
    """

    def __init__(self, trained: Sequence[Place], still: Sequence[Place] = ()) -> None:
        self._changing = _slots(trained)
        self._constant = [place for place in trained if not place.persistent or place.now is None]
        self._still = list(still)
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
            slot.settle()
        _refuse_ties(self._changing)
        self._committed = [slot.home.detach().clone() for slot in self._changing]
        self._shared = {memory(slot.home) for slot in self._changing if self._constant} - {0}
        for place in self._constant:
            place.note(memory(place.now) in self._shared)

    def put_back(self) -> None:
        """Make the live values the committed ones."""
        with torch.no_grad():
            for slot, value in zip(self._changing, self._committed, strict=True):
                slot.put(value)

    def committed(self) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
        """(id of the module, key) of each buffer → its home and its committed value."""
        return {
            (id(place.module), place.key): (slot.home, value)
            for slot, value in zip(self._changing, self._committed, strict=True)
            for place in slot.places
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
                if offset % home.itemsize:  # torch does not look at bytes there as at wider elements
                    piece = piece.clone()
                slot.put(piece.view(home.dtype).view(home.shape) if piece.numel() else home)
                offset += home.nbytes

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """What forward passes change meanwhile in the state_dict is put back, in modules not trained too.

        Raises ProtectError if they change another buffer: not every worker has this batch, and what else a
        module knows of that buffer could not be put back.
        """
        changing = [place for slot in self._changing for place in slot.places]
        places = [*changing, *self._still, *self._constant]
        kept: list[tuple[Place, torch.Tensor, torch.Tensor]] = []
        others: list[tuple[Place, Mark]] = []
        for place in places:
            live = place.now
            if live is not None and place.persistent and not is_expanded(live):
                kept.append((place, live, live.detach().clone()))
            else:
                others.append((place, Mark(live, memory(live) in self._shared)))
        try:
            yield
            for place, mark in others:
                if not mark.fits(place.now):
                    raise ProtectError(
                        f"the buffer {place.name} was changed in job.evaluate, where each worker has batches "
                        f"of its own, and is not in the state_dict: {COMPLETE}"
                    )
        finally:
            with torch.no_grad():
                for place, live, value in kept:
                    with torch.inference_mode(live.is_inference()):
                        live.copy_(value)
                    place.put(live)

    def check(self, in_commit: bool = False) -> None:
        """Raise if a constant is not what it was when the step began.

        The commit, which all workers run alike, may change one; only that it grows is most often a cache, on
        those workers that did something besides.
        """
        for place in self._constant:
            if not (place.noted.fits(place.now) or (in_commit and not place.has_grown)):
                raise ProtectError(_changed(place))


COMPLETE = "let a cache be complete, by one forward pass, before job.steps begins, or be a plain attribute"


def _changed(place: Place) -> str:
    if place.noted.tensor is None:
        return (
            f"the buffer {place.name} was None and was made in a step (by a forward pass?), so not all "
            "workers would have it: register it as a tensor, or let one forward pass make it before "
            "job.steps begins"
        )
    return (
        f"the buffer {place.name} was changed in a step (by a forward pass?), and is not in the state_dict, "
        "so it would differ between workers: a statistic is to be registered with persistent=True; "
        f"{COMPLETE}"
    )


def _refuse_ties(slots: Sequence[Slot]) -> None:
    seen: dict[int, Slot] = {}
    for slot in slots:
        if (other := seen.setdefault(id(slot.home), slot)) is not slot:
            raise ProtectError(
                f"the buffers {other.name} and {slot.name} are one tensor now and were two when job.steps "
                "began: copy the values instead (copy_), or make them one before job.steps"
            )


def _slots(places: Sequence[Place]) -> list[Slot]:
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.persistent and place.now is not None:
            found.setdefault(id(place.now), []).append(place)
    return [Slot(tied, tied[0].now) for tied in found.values() if tied[0].now is not None]


def memory(tensor: torch.Tensor | None) -> int:
    """Which storage it is in; tensors without bytes are in none."""
    return 0 if tensor is None or not tensor.nbytes else tensor.untyped_storage().data_ptr()


def form_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What a buffer keeps."""
    return tensor.shape, tensor.dtype, tensor.device


def count(tensor: torch.Tensor | None) -> int:
    """How often it was written into, as far as torch counts; it does not for inference tensors."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _alike(now: torch.Tensor, before: torch.Tensor) -> bool:
    return form_of(now) == form_of(before) and torch.equal(_bits(now), _bits(before))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in order: NaN equals itself, and 0 is not −0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory: torch writes into none such."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))

"""The protected state of a job as one thing: digested, copied, described, put back.

    state = ProtectedState({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    state.digest()                              after every commit; it rides in the header of the next step
    copy = state.snapshot()                     for writing in the background
    state.restore(copy.description, copy.tensors)

Every call walks the objects anew, because any of them may have changed: optimizer state appears at the first
step, groups change, `.data` is swapped. What a walk keeps for the next are the views of the tensors' memory,
each checked against its tensor before it is used (`memory.Region`).

The digest is XXH3-128 over the canonical trees, then, in name order, each entry's name, dtype, shape, stride
and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Final

import msgspec
import torch
import xxhash

from perdure.schema.errors import ProtectError, ProtocolError, RestoreError
from perdure.state.keepers import ModuleKeeper, keeper_for
from perdure.state.layout import (
    DESCRIPTION_BYTES_MAX,
    FORMAT,
    Description,
    TensorSpec,
    Tree,
    canonical,
    check_description,
    difference,
    encode_description,
    header,
)
from perdure.state.memory import Region, Staging, is_dense, view_of, wait_for
from perdure.state.restoration import Restoration
from perdure.state.scribe import Scribe
from perdure.state.tree import named_dtype

ALIGNMENT: Final = 64
"""Entries of a snapshot begin at multiples of this many bytes."""

Homes = Mapping[tuple[int, str], torch.Tensor]

NOWHERE: Final[Homes] = MappingProxyType({})

_by_name = attrgetter("name")


@dataclass(frozen=True)
class Entry:
    """One run of protected bytes. `tensor` is the live tensor, or a copy where the object hands out no other.

    `volatile` says that the bytes may change before the next commit: buffers that forward passes update,
    generators.
    """

    name: str
    tensor: torch.Tensor
    spec: TensorSpec
    volatile: bool


@dataclass(frozen=True)
class Snapshot:
    """A private copy of a state in host memory.

    `tensors` maps each entry to its bytes (flat uint8, inside `slab`).
    """

    description: Description
    tensors: dict[str, torch.Tensor]
    slab: torch.Tensor

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries together."""
        return self.description.total_bytes

    def without_modes(self) -> Snapshot:
        """The same, but it says nothing of modules' modes: whoever restores it keeps those that it has."""
        return replace(self, description=msgspec.structs.replace(self.description, evaluating=None))

    def digest(self) -> str:
        """The digest of the state that was copied; equal to what `ProtectedState.digest` gave then."""
        return digest_of(self.description, self.tensors)


class ProtectedState:
    """The objects given to `job.protect`, by name. Raises `ProtectError` for what cannot be protected."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        for name in objects:
            if not name.isidentifier():
                raise ProtectError(f"job.protect: {name!r} is no name; use letters, digits and underscores")
        self._keepers = {name: keeper_for(name, objects[name]) for name in sorted(objects)}
        self._regions: dict[int, Region] = {}
        self._staging: Staging | None = None
        self.known_bytes = 0
        """Bytes of all entries together at the last walk: for threads that must not walk themselves."""
        self.parameters: dict[int, torch.Tensor] = {}
        """The parameters of the modules and optimizers at the last walk, by id."""
        self._lasting: dict[str, Region] = {}
        self.note_modes()
        self._walk()
        self._homes = {path: region.pointer for path, region in self._lasting.items()}

    def note_modes(self) -> None:
        """The modes that the modules are in now are those of the state, until the next time.

        A loop may set them at any moment of a step, while the state before it is given to a joiner.
        """
        self._evaluating = self._modes()

    def _modes(self) -> tuple[str, ...]:
        modules = (keeper for keeper in self._keepers.values() if isinstance(keeper, ModuleKeeper))
        return tuple(name for keeper in modules for name in keeper.evaluating())

    def digest(self) -> str:
        """32 hex digits that cover every protected tensor and scalar.

        Reads all bytes once; copies none on the CPU.
        """
        objects, entries = self._walk()
        hasher = xxhash.xxh3_128(canonical(objects))
        update = hasher.update
        if all(region.view is not None for region in entries):
            for region in entries:
                update(region.header)
                update(region.view)  # type: ignore[arg-type]
        else:
            self._staging = self._staging or Staging()
            for piece in self._staging.through(_pieces(entries)):
                update(piece)
        return hasher.hexdigest()

    @property
    def changed(self) -> str:
        """What the last walk found that no script which is started anew could take; '' if nothing."""
        return next((keeper.changed for keeper in self._keepers.values() if keeper.changed), "")

    def describe(self) -> bytes:
        """The state without its bytes, as MessagePack (`layout.decode_description` reads it)."""
        data = encode_description(self.description())
        if len(data) > DESCRIPTION_BYTES_MAX:
            raise ProtectError(
                f"job.protect: the description of the state has {len(data)} bytes, more than "
                f"{DESCRIPTION_BYTES_MAX}; "
                "keep large data in tensors, not in numbers and strings"
            )
        return data

    def description(self) -> Description:
        """The state without its bytes."""
        return self.capture()[0]

    @property
    def total_bytes(self) -> int:
        """Bytes of all entries together."""
        return sum(region.nbytes for region in self._walk()[1])

    def host_memory(self) -> list[tuple[int, int]]:
        """(address, bytes) of every tensor that lies in host memory, as the last walk found them."""
        regions = self._regions.values()
        return [
            (region.pointer, region.nbytes)
            for region in regions
            if region.view is not None and not region.volatile
        ]

    def tensors(self) -> list[Entry]:
        """All entries in name order, each run of memory once (tied tensors share one)."""
        return [Entry(r.name, r.tensor, r.spec, r.volatile) for r in self._walk()[1]]

    def capture(self, homes: Homes = NOWHERE) -> tuple[Description, list[Region]]:
        """The description and the regions of one and the same walk, for whoever gives the bytes away.

        `homes`: the tensors of buffers that a forward pass under way may have replaced (`Scribe`).
        """
        objects, entries = self._walk(homes)
        tensors = [region.spec for region in entries]
        at, lasting = self._homes, self._lasting.items()
        moved = sorted({region.name for path, region in lasting if at.get(path) != region.pointer})
        return Description(FORMAT, objects, tensors, self._evaluating, tuple(moved)), entries

    def snapshot(self, slab: torch.Tensor | None = None) -> Snapshot:
        """A private copy in host memory: in `slab`, if it is large enough, else in a new one.

        Give it the slab of a snapshot that is no longer needed, or one from `touched_slab`: the first
        touch of new memory takes several times as long as the copy.
        """
        described, entries = self.capture()
        description = msgspec.structs.replace(described, evaluating=self._modes())
        offsets, size = layout(description.tensors)
        if slab is None or slab.nbytes < size:
            slab = _new_slab(size)
        tensors: dict[str, torch.Tensor] = {}
        devices = set()
        for region, offset in zip(entries, offsets, strict=True):
            target = slab[offset : offset + region.nbytes]
            target.copy_(region.bytes_now(), non_blocking=True)
            tensors[region.name] = target
            devices.add(region.tensor.device)
        for device in devices:
            wait_for(device)
        return Snapshot(description, tensors, slab)

    @property
    def slab_bytes(self) -> int:
        """Bytes that a snapshot of the state as it is now needs; grows when the optimizer gets its state."""
        return layout(self.description().tensors)[1]

    def landing(self, description: Description) -> dict[str, torch.Tensor]:
        """The live memory into which entries of `description` may be received directly (flat uint8, CPU)."""
        moved = {*description.moved}
        wanted = {(spec.name, header(spec)) for spec in description.tensors if spec.name not in moved}
        return {
            region.name: region.flat
            for region in self._walk()[1]
            if region.flat is not None and region.view is not None and not region.volatile
            if (region.name, region.header) in wanted
        }

    def restore(
        self, description: Description, source: Mapping[str, torch.Tensor], *, adopt: bool = False
    ) -> None:
        """Make the live objects equal to a saved state, bit for bit.

        `source` gives each entry's bytes (flat uint8, CPU). Live tensors of the same form are overwritten in
        place and keep their identity; others are created. With `adopt`, created tensors take over the memory
        of `source`. Raises `RestoreError` with one line that says what does not fit; up to then nothing was
        written, unless an object's own load_state_dict failed or did not give back what it was given.
        """
        check_source(description, source)
        restoration = self._planned(description, source, adopt)
        with torch.no_grad():
            _unless_malformed(restoration.apply)
        self.note_modes()
        torch.clear_autocast_cache()  # it would go on serving casts of the old values (E7)
        self._check_restored(description, source)
        # An order in memory that differed was replaced: that moved nothing.
        for path, region in self._lasting.items():
            if region.name not in restoration.moved:
                self._homes[path] = region.pointer

    def check(self, description: Description) -> None:
        """Raise `RestoreError` if the state described could not be restored here; nothing is written."""
        check_forms(description)
        self._planned(description, {}, adopt=False)

    def _planned(
        self, description: Description, source: Mapping[str, torch.Tensor], adopt: bool
    ) -> Restoration:
        saved = description.objects
        if saved.keys() != self._keepers.keys():
            raise RestoreError(
                f"the saved state holds {', '.join(sorted(saved)) or 'nothing'}; this script protects "
                f"{', '.join(self._keepers) or 'nothing'}"
            )
        restoration = Restoration(description, source, adopt)
        for name, keeper in self._keepers.items():
            _unless_malformed(lambda keeper=keeper, name=name: keeper.plan(saved[name], restoration))  # type: ignore[misc]
        return restoration

    def _check_restored(self, description: Description, source: Mapping[str, torch.Tensor]) -> None:
        """Everything that was not a copy of bytes is compared with what it should have become."""
        objects, entries = self._walk()
        for name, tree in objects.items():
            if found := difference(tree, description.objects[name], name):
                raise RestoreError(f"the state differs after it was restored: {found}")
        if [region.header for region in entries] != [header(spec) for spec in description.tensors]:
            raise RestoreError("the state differs after it was restored: its tensors have other forms")
        for region in entries:
            if region.volatile and not torch.equal(region.bytes_now().cpu(), source[region.name]):
                raise RestoreError(f"the state differs after it was restored: {region.name} has other values")

    def _walk(self, homes: Homes = NOWHERE) -> tuple[dict[str, Tree], list[Region]]:
        scribe = Scribe(self._regions, homes)
        objects = {name: keeper.walk(scribe) for name, keeper in self._keepers.items()}
        self._regions = scribe.regions
        self.parameters = scribe.parameters
        self._lasting = scribe.lasting
        scribe.entries.sort(key=_by_name)
        self.known_bytes = sum(region.nbytes for region in scribe.entries)
        return objects, scribe.entries


def touched_slab(nbytes: int) -> torch.Tensor:
    """Memory for a snapshot (`ProtectedState.slab_bytes`), its pages present. Fit for a background thread."""
    return _new_slab(nbytes).zero_()


def _new_slab(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _unless_malformed(step: Callable[[], None]) -> None:
    """A tree comes from a file or a peer: what is missing in it is their fault, and said so."""
    try:
        step()
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RestoreError(f"the saved state is malformed: {type(error).__name__}: {error}") from error


def _pieces(entries: list[Region]) -> Iterator[bytes | memoryview | torch.Tensor]:
    for region in entries:
        yield region.header
        yield region.view if region.view is not None else region.bytes_now()


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Aligned offsets of the entries in one slab, and its size."""
    offsets: list[int] = []
    size = 0
    for spec in specs:
        offsets.append(size)
        size += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, size


def digest_of(description: Description, source: Mapping[str, torch.Tensor]) -> str:
    """The digest of a state given by its description and its bytes (flat uint8, CPU)."""
    hasher = xxhash.xxh3_128(canonical(description.objects))
    for spec in description.tensors:
        hasher.update(header(spec))
        hasher.update(view_of(source[spec.name]))
    return hasher.hexdigest()


def check_forms(description: Description) -> None:
    """Raise `RestoreError` unless every entry has a known dtype and as many bytes as its shape says."""
    check_description(description)
    for spec in description.tensors:
        form = f"{spec.dtype}{list(spec.shape)}"
        if spec.nbytes != math.prod(spec.shape) * named_dtype(spec.dtype).itemsize:
            raise RestoreError(f"entry {spec.name!r}: {spec.nbytes} bytes are not {form}")
        if spec.stride and not is_dense(spec.shape, spec.stride):
            raise RestoreError(f"entry {spec.name!r}: {form} with strides {list(spec.stride)} is not dense")


def check_source(description: Description, source: Mapping[str, torch.Tensor]) -> None:
    """Raise `RestoreError` unless the description is sound and `source` has every entry's bytes in full."""
    check_forms(description)
    for spec in description.tensors:
        flat = source.get(spec.name)
        if flat is None:
            raise RestoreError(f"the bytes of entry {spec.name!r} are missing")
        if flat.dtype is not torch.uint8 or flat.shape != (spec.nbytes,) or flat.device.type != "cpu":
            raise ProtocolError(f"entry {spec.name!r} must come as {spec.nbytes} flat bytes in host memory")

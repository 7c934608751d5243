"""A state on its way from several donors to a joiner, without sockets: who reads what, and where it lands.

1. Donors and joiner agree on a session: the step that was committed and the digest of the state after it
   (P14).
2. Each donor makes a `Donor` at that boundary; any of them gives the joiner its `description`.
3. The joiner calls `Receiver.begin(session, description)`, deals the numbers of `missing()` chunks out to
   the donors, and for every chunk that arrives: `buffer`, receive into it, `landed`. A donor sends the
   views of `read_views`.
4. When nothing is missing, `finish` checks the digest and swaps the state in. If a donor is lost, its
   chunks are dealt out again; if the session is called off and comes again, `begin` keeps what has landed.

Both sides cut the state into the same chunks, a pure function of the description: a chunk is a piece of
one large tensor, or several small tensors whole (a step counter has four bytes: one message each would
cost more than the bytes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
import torch
import xxhash

from perdure.schema.errors import ProtocolError, RestoreError
from perdure.state.capture import ProtectedState, digest_of, layout
from perdure.state.huge_pages import room
from perdure.state.layout import (
    Description,
    TensorSpec,
    canonical,
    decode_description,
    encode_description,
    header,
)
from perdure.state.memory import Region, flat_bytes, view_of, wait_for

CHUNK_BYTES: Final = 4 << 20
"""Default size of a chunk: large enough for the socket, small enough to share the work evenly."""

PACKED_BYTES: Final = 64 << 10
"""Tensors up to this size travel together, which takes another copy of them."""

_TOUCH_BYTES: Final = 8 << 20
_SLACK_BYTES: Final = 1 << 20  # entries begin at multiples of some bytes


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which state is being given: that after the commit of `step`, with this digest."""

    step: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """`length` bytes of the entry number `tensor` of the description, from `offset` on."""

    tensor: int
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """What travels as one message: its pieces' bytes one after the other, `length` in all."""

    index: int
    pieces: tuple[Piece, ...]
    length: int


def chunks(tensors: list[TensorSpec], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut a state into chunks of at most `chunk_bytes`.

    Every byte is in exactly one. The same at both ends. Those of several tensors come first: their bytes lie
    scattered over the state, and its digest is taken from the beginning on.
    """
    if chunk_bytes < 1:
        raise ProtocolError(f"a chunk of {chunk_bytes} bytes cannot carry anything")
    cut: list[tuple[Piece, ...]] = []
    packs: list[tuple[Piece, ...]] = []
    pack: list[Piece] = []
    packed = 0
    for number, spec in enumerate(tensors):
        if spec.nbytes > min(PACKED_BYTES, chunk_bytes // 4):
            cut += [
                (Piece(number, offset, min(chunk_bytes, spec.nbytes - offset)),)
                for offset in range(0, spec.nbytes, chunk_bytes)
            ]
        elif spec.nbytes:
            if packed + spec.nbytes > chunk_bytes:
                packs.append(tuple(pack))
                pack, packed = [], 0
            pack.append(Piece(number, 0, spec.nbytes))
            packed += spec.nbytes
    if pack:
        packs.append(tuple(pack))
    return [
        Chunk(index, pieces, sum(piece.length for piece in pieces))
        for index, pieces in enumerate([*packs, *cut])
    ]


class Donor:
    """Gives away the state as it is now. Make it between two commits; it is void at the next commit.

    Parameters and optimizer state on the CPU are read where they lie: they cannot change before the next
    commit. Buffers and generators can, so they are copied here. What is on a device is copied piece by
    piece on a stream of its own, so that the donor's computing is not waited for.
    """

    def __init__(
        self,
        state: ProtectedState,
        session: Session,
        chunk_bytes: int = CHUNK_BYTES,
        buffers: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            buffers: (id of a module, key) of a buffer → its tensor and the committed value, for those whose
                live value, or tensor, may be another meanwhile.
        """
        described, regions = state.capture({slot: home for slot, (home, _) in buffers.items()})
        committed = {home.data_ptr(): value for home, value in buffers.values()}
        self.session = session
        self._described = described
        self.description = encode_description(described)
        self.total_bytes = described.total_bytes
        self._chunks = chunks(described.tensors, chunk_bytes)
        self._bytes = [_given(region, committed) for region in regions]
        self._views = [view_of(flat) if flat.device.type == "cpu" else None for flat in self._bytes]
        self._streams = {
            flat.device: _side_stream(flat.device) for flat in self._bytes if flat.device.type == "cuda"
        }

    def digest(self) -> str:
        """The digest of the state that is given."""
        given = zip(self._described.tensors, self._bytes, strict=True)
        return digest_of(self._described, {spec.name: flat.cpu() for spec, flat in given})

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each tensor of the description lies in host memory; 0 for one that does not."""
        return tuple(flat.data_ptr() if flat.device.type == "cpu" else 0 for flat in self._bytes)

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self._chunks)

    def read_views(self, session: Session, index: int) -> list[memoryview] | None:
        """The bytes of a chunk, to be sent one after the other; None if the session is another one.

        Safe to call from a thread beside the one that trains. Raises `ProtocolError` for a chunk that does
        not exist.
        """
        if session != self.session:
            return None
        if not 0 <= index < len(self._chunks):
            raise ProtocolError(f"chunk {index} of {len(self._chunks)} was asked for")
        return [self._read(piece) for piece in self._chunks[index].pieces]

    def _read(self, piece: Piece) -> memoryview:
        stop = piece.offset + piece.length
        view = self._views[piece.tensor]
        if view is not None:
            return view[piece.offset : stop]
        flat = self._bytes[piece.tensor][piece.offset : stop]
        if flat.device.type != "cuda":
            return view_of(flat.cpu())
        host = torch.empty(piece.length, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._streams[flat.device]):
            host.copy_(flat, non_blocking=True)
            wait_for(flat.device)
        return view_of(host)


def _given(region: Region, committed: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The flat bytes that a donor gives for a region."""
    if region.volatile and region.pointer in committed:
        return flat_bytes(committed[region.pointer]).cpu().clone()
    flat = region.bytes_now()
    return flat.cpu().clone() if region.volatile else flat


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that begins after everything queued so far, the commit included."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


class _Running:
    """The digest of a state while it arrives, from the beginning on as far as everything has landed."""

    def __init__(self, description: Description, cut: Sequence[Chunk], views: Sequence[memoryview]) -> None:
        self._hasher = xxhash.xxh3_128(canonical(description.objects))
        self._headers = [header(spec) for spec in description.tensors]
        self._views = views
        empty = [(n, 0, 0, -1) for n, spec in enumerate(description.tensors) if not spec.nbytes]
        pieces = [(p.tensor, p.offset, p.length, chunk.index) for chunk in cut for p in chunk.pieces]
        self._todo = sorted(empty + pieces, reverse=True)
        self._busy = threading.Lock()

    def go_on(self, missing: Collection[int], wait: bool = False) -> None:
        """Take what has landed since; at once back if another thread is at it, unless told to wait."""
        if not self._busy.acquire(blocking=wait):
            return
        try:
            while self._todo and self._todo[-1][3] not in missing:
                tensor, offset, length, _ = self._todo.pop()
                if not offset:
                    self._hasher.update(self._headers[tensor])
                self._hasher.update(self._views[tensor][offset : offset + length])
        finally:
            self._busy.release()

    def result(self) -> str:
        """The digest of the whole; everything must have landed."""
        self.go_on((), wait=True)
        return self._hasher.hexdigest()


@dataclass
class _Arrival:
    """One session's chunks and where they land."""

    session: Session
    raw: bytes
    description: Description
    chunks: list[Chunk]
    buffers: dict[str, torch.Tensor]
    views: list[memoryview]
    missing: set[int]
    packs: dict[int, memoryview]
    running: _Running


class Receiver:
    """Takes a state in. Several threads may call `buffer` and `landed` at once, one per donor.

    With `staged`, everything lands in private buffers and the live state is touched only after the digest
    was checked. Without, parameters and optimizer state that exist already land in place, which saves
    their memory and a copy; if the digest is then wrong, the live state is void. What does not exist yet
    lands where it stays; `reserve` makes that memory ready ahead of time, since the first touch of new
    memory takes longer than the copy into it.
    """

    def __init__(self, state: ProtectedState, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._state = state
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._arrival: _Arrival | None = None
        self._reserve = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, hurry: Callable[[], bool]) -> None:
        """Make room for a state of `nbytes`, as far as it exceeds this one; until `hurry` says to stop."""
        slab = room(max(0, nbytes - self._state.known_bytes) + _SLACK_BYTES)
        for start in range(0, slab.nbytes, _TOUCH_BYTES):
            if hurry():
                break
            slab[start : start + _TOUCH_BYTES].zero_()
        self._reserve = slab

    def begin(self, session: Session, description: bytes, *, staged: bool = True) -> None:
        """Start a session, or go on with it if it is the same; what landed of another is thrown away.

        Raises `RestoreError` if the state described does not fit the live objects.
        """
        with self._lock:
            if self._arrival and (self._arrival.session, self._arrival.raw) == (session, description):
                return
            self._arrival = None
            described = decode_description(description)
            self._state.check(described)
            cut = chunks(described.tensors, self._chunk_bytes)
            live = self._state.landing(described)
            buffers = {
                spec.name: torch.empty(spec.nbytes, dtype=torch.uint8) if staged else live[spec.name]
                for spec in described.tensors
                if spec.name in live
            }
            buffers |= self._place([spec for spec in described.tensors if spec.name not in live])
            views = [view_of(buffers[spec.name]) for spec in described.tensors]
            self._arrival = _Arrival(
                session=session,
                raw=description,
                description=described,
                chunks=cut,
                buffers=buffers,
                views=views,
                missing={chunk.index for chunk in cut},
                packs={},
                running=_Running(described, cut, views),
            )

    def missing(self) -> list[Chunk]:
        """The chunks that have not landed, in order. Empty before `begin`."""
        with self._lock:
            arrival = self._arrival
            return [arrival.chunks[index] for index in sorted(arrival.missing)] if arrival else []

    def buffer(self, session: Session, index: int) -> memoryview | None:
        """Where to receive a chunk; None if it is of another session or has landed.

        Read its bytes and throw them away.
        """
        with self._lock:
            arrival = self._of(session)
            if arrival is None or index not in arrival.missing:
                return None
            chunk = arrival.chunks[index]
            if len(chunk.pieces) == 1:
                piece = chunk.pieces[0]
                return arrival.views[piece.tensor][piece.offset : piece.offset + piece.length]
            return arrival.packs.setdefault(index, memoryview(bytearray(chunk.length)))

    def landed(self, session: Session, index: int) -> bool:
        """Say that the buffer of a chunk is full. False if it is of another session or had landed before."""
        with self._lock:
            arrival = self._of(session)
            if arrival is None or index not in arrival.missing:
                return False
            pack = arrival.packs.pop(index, None)
            if pack is not None:
                _unpack(pack, arrival.chunks[index].pieces, arrival.views)
            elif len(arrival.chunks[index].pieces) > 1:
                raise ProtocolError(f"chunk {index} landed although no buffer was taken for it")
            arrival.missing.discard(index)
        arrival.running.go_on(arrival.missing)
        return True

    def finish(self, expected: str = "") -> str:
        """Check the digest, swap the state in, and return the digest.

        `expected` is for a session that began before its digest was known. Raises `ProtocolError` while
        chunks are missing, and `RestoreError` if the digest is another or the state does not fit; the next
        `begin` then starts from zero.
        """
        with self._lock:
            arrival = self._arrival
            if arrival is None or arrival.missing:
                raise ProtocolError(
                    f"{len(arrival.missing) if arrival else 'all'} chunks of the state are missing"
                )
            self._arrival = None
        digest, expected = arrival.running.result(), expected or arrival.session.digest
        if digest != expected:
            raise RestoreError(
                f"the state received for step {arrival.session.step} has the digest {digest} instead of "
                f"{expected}; it is received anew"
            )
        self._state.restore(arrival.description, arrival.buffers, adopt=True)
        return digest

    def _place(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """Memory for tensors that the state has not yet, side by side in what was reserved."""
        offsets, size = layout(specs)
        slab, self._reserve = self._reserve, torch.empty(0, dtype=torch.uint8)
        if slab.nbytes < size:
            return {spec.name: torch.empty(spec.nbytes, dtype=torch.uint8) for spec in specs}
        return {spec.name: slab[at : at + spec.nbytes] for spec, at in zip(specs, offsets, strict=True)}

    def _of(self, session: Session) -> _Arrival | None:
        arrival = self._arrival
        return arrival if arrival is not None and arrival.session == session else None


def _unpack(pack: memoryview, pieces: Iterable[Piece], views: list[memoryview]) -> None:
    start = 0
    for piece in pieces:
        views[piece.tensor][: piece.length] = pack[start : start + piece.length]
        start += piece.length

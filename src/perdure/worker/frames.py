"""The bytes between two workers' meshes.

Every frame is a head of fixed size, then a tail that is read whole, then, for INLINE alone, a payload that
is read straight to where it belongs.

    CONTROL  tail: the message
    INLINE   tail: meta                                payload: the bytes
    OFFER    tail: meta, then (address, length) pairs  the bytes stay in the sender's memory, to be read there
    TAKEN    an offer was read (or was not wanted)     SEND  it cannot be read: send it inline, please
    HELLO    tail: pid, address and bytes of a token   READY `kind` 1: I can read your memory
    BYE      nothing follows, and that is no failure
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from perdure.schema.errors import WireError
from perdure.worker.memory import Pieces
from perdure.worker.transport import Bulk

META_LIMIT = 1 << 20
CONTROL_LIMIT = 16 << 20
PIECES_LIMIT = 1 << 16
PAYLOAD_LIMIT = 1 << 40

_HEAD = struct.Struct("<BBxxIIIIqqqqQ")
HEAD_BYTES = _HEAD.size
_HELLO = struct.Struct("<qQ16s")
TOKEN_BYTES = 16
PIECE_BYTES = 16


class Kind(enum.IntEnum):
    """The first byte of a frame."""

    CONTROL = 1
    INLINE = 2
    OFFER = 3
    TAKEN = 4
    SEND = 5
    HELLO = 6
    READY = 7
    BYE = 8


_INLINE = int(Kind.INLINE)
# The most that may follow the head as meta, by frame; of a CONTROL or a HELLO it is all that follows.
_TAIL_LIMITS = (0, CONTROL_LIMIT, META_LIMIT, META_LIMIT, 0, 0, _HELLO.size, 0, 0)


class Head(NamedTuple):
    """A decoded head: `pieces` and `ticket` speak of offers, `length` is the payload's."""

    frame: int
    kind: int
    pieces: int
    meta: int
    ticket: int
    bucket: int
    step: int
    first: int
    lo: int
    hi: int
    length: int

    @property
    def tail(self) -> int:
        """Bytes that follow the head and are read as one piece: the message, or meta and places."""
        return self.meta + self.pieces * PIECE_BYTES

    @property
    def carries_payload(self) -> bool:
        """`length` bytes follow the tail."""
        return self.frame == _INLINE

    def bulk(self, tail: bytes) -> Bulk:
        """The caller's part of an INLINE or OFFER frame."""
        meta = tail[: self.meta]
        return Bulk(self.kind, self.step, self.bucket, self.first, self.lo, self.hi, meta)


def parse_head(data: bytes | bytearray | memoryview, at: int) -> Head:
    """Decode the head at byte `at`; raises WireError if no worker of this version sends such a one."""
    head = Head._make(_HEAD.unpack_from(data, at))
    if not 0 < head.frame < len(_TAIL_LIMITS):
        raise WireError(f"unknown frame {head.frame}")
    if head.meta > _TAIL_LIMITS[head.frame] or head.pieces > PIECES_LIMIT or head.length > PAYLOAD_LIMIT:
        raise WireError(f"frame {head.frame} is over a limit: {head}")
    return head


def control(body: bytes) -> bytes:
    """A CONTROL frame."""
    if len(body) > CONTROL_LIMIT:
        raise WireError(f"a control message of {len(body)} bytes is over the limit of {CONTROL_LIMIT}")
    return _HEAD.pack(Kind.CONTROL, 0, 0, len(body), 0, 0, 0, 0, 0, 0, 0) + body


def inline(header: Bulk, length: int) -> bytes:
    """Head and tail of an INLINE frame; `length` bytes of payload have to follow."""
    return _bulk(Kind.INLINE, header, 0, 0, length) + header.meta


def offer(header: Bulk, ticket: int, pieces: Pieces) -> bytes:
    """An OFFER of pieces of this process's memory."""
    places = pieces.places
    head = _bulk(Kind.OFFER, header, len(places) // 2, ticket, pieces.nbytes)
    return head + header.meta + struct.pack(f"<{len(places)}Q", *places)


def answer(frame: Kind, ticket: int) -> bytes:
    """TAKEN or SEND."""
    return _HEAD.pack(frame, 0, 0, 0, ticket, 0, 0, 0, 0, 0, 0)


def hello(pid: int, address: int, token: bytes) -> bytes:
    """HELLO: `token` lies at `address` in process `pid`, for whoever can read it there."""
    return _HEAD.pack(Kind.HELLO, 0, 0, _HELLO.size, 0, 0, 0, 0, 0, 0, 0) + _HELLO.pack(pid, address, token)


def parse_hello(tail: bytes) -> tuple[int, int, bytes]:
    """(pid, address, token) of a HELLO's tail."""
    if len(tail) != _HELLO.size:
        raise WireError(f"a HELLO of {len(tail)} bytes")
    pid, address, token = _HELLO.unpack(tail)
    return pid, address, token


def signal(frame: Kind, kind: int = 0) -> bytes:
    """READY or BYE."""
    return _HEAD.pack(frame, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _bulk(frame: Kind, header: Bulk, pieces: int, ticket: int, length: int) -> bytes:
    kind, step, bucket, first, lo, hi, meta = header
    if len(meta) > META_LIMIT:
        raise WireError(f"meta of {len(meta)} bytes is over the limit of {META_LIMIT}")
    return _HEAD.pack(frame, kind, pieces, len(meta), ticket, bucket, step, first, lo, hi, length)

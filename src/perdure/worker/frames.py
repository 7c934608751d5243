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
from collections.abc import Sequence
from typing import NamedTuple

from perdure.schema.errors import WireError
from perdure.worker.transport import Bulk

META_LIMIT = 1 << 20
CONTROL_LIMIT = 16 << 20
PIECES_LIMIT = 1 << 16
PAYLOAD_LIMIT = 1 << 40

_HEAD = struct.Struct("<BBHIIIIqqqqQ")
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


class Head(NamedTuple):
    """A decoded head: `pieces` and `ticket` speak of offers, `length` is of the message or the payload."""

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
        """Bytes that follow the head and are read as one piece."""
        if self.frame == Kind.CONTROL:
            return self.length
        if self.frame == Kind.HELLO:
            return _HELLO.size
        return self.meta + self.pieces * PIECE_BYTES

    @property
    def carries_payload(self) -> bool:
        """`length` bytes follow the tail."""
        return self.frame == Kind.INLINE

    def bulk(self, tail: bytes) -> Bulk:
        """The caller's part of an INLINE or OFFER frame."""
        meta = tail[: self.meta]
        return Bulk(self.kind, self.step, self.bucket, self.first, self.lo, self.hi, meta)


def parse_head(data: bytes | bytearray | memoryview, at: int) -> Head:
    """Decode the head at byte `at`; raises WireError if no worker of this version sends such a one."""
    frame, kind, _, pieces, meta, ticket, bucket, step, first, lo, hi, length = _HEAD.unpack_from(data, at)
    head = Head(frame, kind, pieces, meta, ticket, bucket, step, first, lo, hi, length)
    if not Kind.CONTROL <= frame <= Kind.BYE:
        raise WireError(f"unknown frame {frame}")
    if meta > META_LIMIT or pieces > PIECES_LIMIT:
        raise WireError(f"frame {frame} announces {meta} bytes of meta and {pieces} pieces")
    if length > (CONTROL_LIMIT if frame == Kind.CONTROL else PAYLOAD_LIMIT):
        raise WireError(f"frame {frame} announces {length} bytes")
    return head


def control(body: bytes) -> bytes:
    """A CONTROL frame."""
    if len(body) > CONTROL_LIMIT:
        raise WireError(f"a control message of {len(body)} bytes is over the limit of {CONTROL_LIMIT}")
    return _HEAD.pack(Kind.CONTROL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(body)) + body


def inline(header: Bulk, length: int) -> bytes:
    """Head and tail of an INLINE frame; `length` bytes of payload have to follow."""
    return _bulk(Kind.INLINE, header, 0, 0, length) + header.meta


def offer(header: Bulk, ticket: int, pieces: Sequence[tuple[int, int]]) -> bytes:
    """An OFFER of `pieces`, each an address in this process and a length in bytes."""
    length = sum(nbytes for _, nbytes in pieces)
    flat = [number for piece in pieces for number in piece]
    head = _bulk(Kind.OFFER, header, len(pieces), ticket, length)
    return head + header.meta + struct.pack(f"<{len(flat)}Q", *flat)


def answer(frame: Kind, ticket: int) -> bytes:
    """TAKEN or SEND."""
    return _HEAD.pack(frame, 0, 0, 0, 0, ticket, 0, 0, 0, 0, 0, 0)


def hello(pid: int, address: int, token: bytes) -> bytes:
    """HELLO: `token` lies at `address` in process `pid`, for whoever can read it there."""
    return _HEAD.pack(Kind.HELLO, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) + _HELLO.pack(pid, address, token)


def parse_hello(tail: bytes) -> tuple[int, int, bytes]:
    """(pid, address, token) of a HELLO's tail."""
    pid, address, token = _HELLO.unpack(tail)
    return pid, address, token


def signal(frame: Kind, kind: int = 0) -> bytes:
    """READY or BYE."""
    return _HEAD.pack(frame, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _bulk(frame: Kind, header: Bulk, pieces: int, ticket: int, length: int) -> bytes:
    if len(header.meta) > META_LIMIT:
        raise WireError(f"meta of {len(header.meta)} bytes is over the limit of {META_LIMIT}")
    return _HEAD.pack(
        frame, header.kind, 0, pieces, len(header.meta), ticket,
        header.bucket, header.step, header.first, header.lo, header.hi, length,
    )  # fmt: skip

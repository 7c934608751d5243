"""The wire: frames of messages, and the proof that both ends know the secret. No input or output here.

A frame is a 4-byte big-endian length and that many bytes of msgpack, decoded strictly as a type of
`schema.messages`. On TCP a connection starts with four fixed-size frames that are no messages:

1. initiator → acceptor   hello: magic, version of the wire, role, nonce (41 bytes)
2. acceptor → initiator   hello
3. initiator → acceptor   proof: HMAC-SHA256(secret, "initiator" · hello · hello) (32 bytes)
4. acceptor → initiator   proof: the same with "acceptor"

Both hellos stand in both proofs, so that neither can be replayed, reflected or moved to another role or
version. The initiator proves first: a stranger is given nothing that was made with the secret, and costs
its acceptor 73 bytes of memory. What follows is not encrypted; across hosts the connection is TLS.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from perdure.schema.errors import WireError

CONTROL_LIMIT: Final = 16 * 2**20
"""Largest body of a control frame, in bytes."""

NONCE_BYTES: Final = 32

_LENGTH = struct.Struct(">I")
_MAGIC = b"perdure"
_VERSION = 1
_HELLO = struct.Struct(f">{len(_MAGIC)}sBB{NONCE_BYTES}s")
_PROOF_BYTES = hashlib.sha256().digest_size
_ENCODER = msgspec.msgpack.Encoder()

T = TypeVar("T")


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────


def frame(body: bytes | msgspec.Raw, limit: int = CONTROL_LIMIT) -> bytes:
    """`body` with its length in front. Raises WireError when it is empty or larger than `limit` bytes."""
    view = memoryview(body)
    if not 0 < len(view) <= limit:
        raise WireError(f"a frame of {len(view)} bytes; allowed are 1 to {limit}")
    return _LENGTH.pack(len(view)) + view


def encode(message: msgspec.Struct, limit: int = CONTROL_LIMIT) -> bytes:
    """`message` as one frame. Raises WireError when its body is larger than `limit` bytes."""
    return frame(_ENCODER.encode(message), limit)


def body(message: msgspec.Struct) -> msgspec.Raw:
    """`message` without its length: what FromWorker and ToWorker carry."""
    return msgspec.Raw(_ENCODER.encode(message))


class Splitter:
    """Cuts a stream of bytes into the bodies of its frames, wherever the stream is split.

    Holds one incomplete frame at most. After a WireError the connection is of no use: the error is
    raised again.
    """

    def __init__(self, limit: int = CONTROL_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._error: WireError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises WireError on a length of 0 or above the limit."""
        if self._error is not None:
            raise self._error
        buffer = self._buffer
        buffer += data
        bodies, at = [], 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if not 0 < length <= self._limit:
                self._error = WireError(
                    f"a frame of {length} bytes announced; allowed are 1 to {self._limit}"
                )
                raise self._error
            if len(buffer) - at < _LENGTH.size + length:
                break
            at += _LENGTH.size
            bodies.append(bytes(buffer[at : at + length]))
            at += length
        del buffer[:at]
        return bodies


class Decoder(Generic[T]):
    """Decodes one body as `kind` (a message type or a union of them), strictly."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, strict=True)

    def decode(self, body: bytes | msgspec.Raw) -> T:
        """Raises WireError on anything that is not exactly a message of `kind`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, MemoryError) as error:
            raise WireError(f"not a message of this connection: {error}") from error


class FrameReader(Generic[T]):
    """Turns the bytes of one connection into messages of `kind`, wherever the stream is split."""

    def __init__(self, kind: Any, limit: int = CONTROL_LIMIT) -> None:
        self._splitter = Splitter(limit)
        self._decoder: Decoder[T] = Decoder(kind)

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes.

        Raises WireError when a frame is too large, malformed or of an unknown type; the connection is
        to be closed then.
        """
        return [self._decoder.decode(part) for part in self._splitter.feed(data)]


# ── proof of the secret ─────────────────────────────────────────────────────────────────────────────


class Role(enum.IntEnum):
    """What an end of a connection is; stands in the proof."""

    COORDINATOR = 1
    AGENT = 2
    OBSERVER = 3
    WORKER = 4


class Handshake:
    """One end of the mutual proof, as a state machine over bytes.

        handshake = Handshake(secret, Role.AGENT, os.urandom(NONCE_BYTES), {Role.COORDINATOR}, initiator=True)
        send(handshake.opening())
        while not handshake.done:
            send(handshake.feed(receive()))
        reader.feed(handshake.rest)         # what came after the proof in the same segment

    `done` is true when the *other* end has proved the secret, and only then may a message be sent or
    decoded; `peer` is its role. An acceptor limits the time and the number of unproved connections.
    """

    def __init__(
        self,
        secret: bytes,
        role: Role,
        nonce: bytes,
        expects: frozenset[Role] | set[Role],
        *,
        initiator: bool,
    ) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce of {len(nonce)} bytes; expected {NONCE_BYTES}")
        self._secret = secret
        self._expects = frozenset(expects)
        self._initiator = initiator
        self._own = _HELLO.pack(_MAGIC, _VERSION, role, nonce)
        self._theirs = b""
        self._buffer = b""
        self.peer: Role | None = None
        self.done = False

    @property
    def rest(self) -> bytes:
        """The bytes received after the proof: the first frames."""
        return self._buffer if self.done else b""

    @property
    def waiting_for_proof(self) -> bool:
        """This end has proved itself and the other has not: if it closes now, it does not know the secret."""
        return self._initiator and bool(self._theirs) and not self.done

    def opening(self) -> bytes:
        """What this end sends first: the initiator's hello; nothing from an acceptor."""
        return self._own if self._initiator else b""

    def feed(self, data: bytes) -> bytes:
        """What to send in answer to `data`. Raises WireError if the other end is not to be spoken to."""
        self._buffer += data
        answer = b""
        if not self._theirs:
            # A wrong first byte is enough to close: nobody has to wait for a stranger's 41st.
            if not _MAGIC.startswith(self._buffer[: len(_MAGIC)]):
                raise WireError("the other end does not speak perdure's wire")
            if len(self._buffer) < _HELLO.size:
                return b""
            self._accept_hello(self._take(_HELLO.size))
            answer = self._proof("initiator") if self._initiator else self._own
        if not self.done and len(self._buffer) >= _PROOF_BYTES:
            other = "acceptor" if self._initiator else "initiator"
            if not hmac.compare_digest(self._take(_PROOF_BYTES), self._proof(other)):
                raise WireError("the other end does not know the secret")
            self.done = True
            if not self._initiator:
                answer += self._proof("acceptor")
        return answer

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _accept_hello(self, hello: bytes) -> None:
        _, version, role, nonce = _HELLO.unpack(hello)
        if version != _VERSION:
            raise WireError(
                f"the other end speaks version {version} of the wire, this one version {_VERSION}"
            )
        if role not in self._expects:
            raise WireError(f"the other end has role {role}; expected {sorted(self._expects)}")
        if nonce == self._own[-NONCE_BYTES:]:
            raise WireError("the other end sent this end's own nonce back")
        self.peer = Role(role)
        self._theirs = hello

    def _proof(self, side: str) -> bytes:
        first, second = (self._own, self._theirs) if self._initiator else (self._theirs, self._own)
        return hmac.digest(self._secret, side.encode() + first + second, "sha256")


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for `purpose` (32 bytes): workers get one for the data plane and never see the secret itself."""
    return hmac.digest(secret, b"perdure key: " + purpose.encode(), "sha256")

"""Proof of the job's secret between two workers, as two small state machines over bytes.

    caller → listener   hello: magic, kind, generation, caller, listener, nonce c
    listener → caller   nonce s, HMAC(secret, "listener" · hello · s)
    caller → listener   HMAC(secret, "caller" · hello · s)

Each side proves itself over both nonces, so nothing recorded can be played again; the labels keep one
side's proof from serving as the other's. `feed` never asks for a byte more than the handshake has, so
whatever follows on the connection stays in the kernel. What follows is neither encrypted nor signed: the
network between workers is trusted not to alter established connections.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from perdure.schema.errors import WireError
from perdure.schema.ids import Generation, WorkerId

MESH = 1
HEAL = 2

_MAGIC = b"PERDURE1"
_HELLO = struct.Struct("<8sBqqqq32s")
_NONCE_BYTES = 32
_MAC_BYTES = 32


class Hello(NamedTuple):
    """Why a worker connects: a mesh of `generation`, or healing."""

    kind: int
    generation: Generation
    caller: WorkerId
    listener: WorkerId


class Calling:
    """The connecting side: send `start`, then feed what arrives until `done`."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        self._hello = _HELLO.pack(
            _MAGIC, hello.kind, hello.generation.incarnation, hello.generation.number,
            hello.caller, hello.listener, secrets.token_bytes(_NONCE_BYTES),
        )  # fmt: skip
        self._buffer = b""
        self.start = self._hello
        self.wants = _NONCE_BYTES + _MAC_BYTES
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take received bytes (at most `wants`); returns what to send. Raises WireError on a stranger."""
        self._buffer += data
        self.wants -= len(data)
        if self.wants:
            return b""
        nonce, mac = self._buffer[:_NONCE_BYTES], self._buffer[_NONCE_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._secret, b"listener", self._hello, nonce)):
            raise WireError("the peer that was called does not know the job's secret")
        self.done = True
        return _mac(self._secret, b"caller", self._hello, nonce)


class Answering:
    """The listening side: feed what arrives until `hello` is set."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._buffer = b""
        self._opening = b""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.wants = _HELLO.size
        self.hello: Hello | None = None

    def feed(self, data: bytes) -> bytes:
        """Take received bytes (at most `wants`); returns what to send. Raises WireError on a stranger."""
        self._buffer += data
        self.wants -= len(data)
        if self.wants:
            return b""
        if not self._opening:
            if not self._buffer.startswith(_MAGIC):
                raise WireError("a connection that does not speak this protocol")
            self._opening, self._buffer = self._buffer, b""
            self.wants = _MAC_BYTES
            return self._nonce + _mac(self._secret, b"listener", self._opening, self._nonce)
        if not hmac.compare_digest(self._buffer, _mac(self._secret, b"caller", self._opening, self._nonce)):
            raise WireError("a connection that does not know the job's secret")
        _, kind, incarnation, number, caller, listener, _ = _HELLO.unpack(self._opening)
        self.hello = Hello(kind, Generation(incarnation, number), caller, listener)
        return b""


def _mac(secret: bytes, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, label + hello + nonce, "sha256")

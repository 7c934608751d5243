"""How a running coordinator is reached from the command line, and asked for its workers."""

from __future__ import annotations

import os
import socket

import msgspec

from perdure.schema.errors import WireError
from perdure.schema.messages import PsReply, PsRequest, PsRow
from perdure.schema.wire import NONCE_BYTES, FrameReader, Handshake, Role, encode

ACCESS = "coordinator.json"
ANSWER_S = 5.0


class Access(msgspec.Struct, frozen=True):
    """The content of RUN_DIR/coordinator.json, while a run goes on; readable by its owner alone."""

    host: str
    port: int
    secret: str
    pid: int


def rows_of(host: str, port: int, secret: bytes) -> tuple[PsRow, ...]:
    """The workers of the coordinator at an address. Raises OSError and WireError."""
    with socket.create_connection((host, port), ANSWER_S) as sock:
        handshake = Handshake(
            secret, Role.OBSERVER, os.urandom(NONCE_BYTES), {Role.COORDINATOR}, initiator=True
        )
        sock.sendall(handshake.opening())
        while not handshake.done:
            sock.sendall(handshake.feed(_some(sock)))
        sock.sendall(encode(PsRequest()))
        reader: FrameReader[PsReply] = FrameReader(PsReply)
        replies = reader.feed(handshake.rest)
        while not replies:
            replies = reader.feed(_some(sock))
        return replies[0].rows


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise WireError("it closed the connection")
    return data

"""The agent's connection to the coordinator: proved, kept, and made again when it is lost.

What is said while there is no connection waits and is sent after the next hello, which tells the
coordinator which workers exist. What was under way when a connection broke may be lost: the coordinator
asks the workers for their positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perdure.schema.errors import OrphanedError, UsageError, WireError
from perdure.schema.messages import (
    AgentHello,
    AgentMessage,
    AgentWelcome,
    CoordinatorToAgent,
    EndAgent,
    Status,
)
from perdure.schema.wire import NONCE_BYTES, FrameReader, Handshake, Role, encode

HANDSHAKE_S: Final = 10.0
RETRY_S_MIN: Final = 0.05
RETRY_S_MAX: Final = 2.0
UNSENT_BYTES_MAX: Final = 64 * 2**20
"""A coordinator that leaves more than this unread is taken for lost; so much is kept while it is away."""

SILENT_S: Final = 15.0
"""The kernel gives a connection up when the other host has acknowledged nothing for so long."""

_CHUNK = 262144


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where the coordinator is and what opens it; `orphan_s` is how long it may be away."""

    host: str
    port: int
    secret: bytes
    orphan_s: float = 60.0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Link:
    """Keeps one connection to the coordinator.

    `hello` makes the first frame of each connection; `receive` gets every message, of which the first is an
    AgentWelcome, or the EndAgent of a coordinator that has no place for this agent. `say` tells the person
    at the terminal that the coordinator is out of reach, or back.
    """

    def __init__(
        self,
        target: Target,
        hello: Callable[[], AgentHello],
        receive: Callable[[CoordinatorToAgent], None],
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._hello = hello
        self._receive = receive
        self._say = say
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._known = False

    @property
    def connected(self) -> bool:
        """Whether the coordinator is within reach, as far as is known."""
        return self._writer is not None

    async def run(self) -> None:
        """Stay connected until cancelled.

        Raises UsageError when what answers at first is no coordinator or has another secret, OrphanedError
        when none has answered for `orphan_s`.
        """
        lost_s, retry_s, told = time.monotonic(), RETRY_S_MIN, False
        while True:
            tried_s = time.monotonic()
            try:
                await self._connect_and_listen()
            except (OSError, WireError, EOFError, TimeoutError) as error:
                silent = isinstance(error, TimeoutError)
                reason = "no answer" if silent else str(error) or type(error).__name__
            if self._writer is not None:
                self._writer.transport.abort()
                self._writer = None
                lost_s = time.monotonic()
                then = f"trying for {self._target.orphan_s:g} s; workers go on meanwhile"
                self._say(f"the coordinator at {self._target} is out of reach; {then}")
                if lost_s - tried_s > RETRY_S_MAX:  # else it may be one that closes whatever we say
                    retry_s = RETRY_S_MIN
            elif time.monotonic() - lost_s > self._target.orphan_s:
                raise OrphanedError(
                    f"no coordinator at {self._target} for {self._target.orphan_s:g} s: {reason}"
                )
            elif not self._known and not told:
                told = True
                self._say(
                    f"no coordinator at {self._target} yet, trying for {self._target.orphan_s:g} s: {reason}"
                )
            # Spread out: all the agents of a cluster lose their coordinator in the same moment.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, RETRY_S_MAX)

    def send(self, message: AgentMessage) -> None:
        """Send now, or after the next hello. A `Status` is only sent now: the next one replaces it."""
        data = encode(message)
        if self._writer is not None:
            if not self._writer.is_closing():  # it is lost then, and known to be in a moment
                self._writer.write(data)
            if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                self._writer.transport.abort()
        elif not isinstance(message, Status):
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            while self._unsent_bytes > UNSENT_BYTES_MAX:
                self._unsent_bytes -= len(self._unsent.popleft())

    async def close(self, wait_s: float = 1.0) -> None:
        """Send what waits, if there is a connection, and close it."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(wait_s):
                    await writer.wait_closed()

    async def _connect_and_listen(self) -> None:
        """One connection, to its end, which is always an error. `_writer` is set from the welcome on."""
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            _give_up_on_silence(writer.get_extra_info("socket"))
            frames: FrameReader[CoordinatorToAgent] = FrameReader(CoordinatorToAgent)
            async with asyncio.timeout(HANDSHAKE_S):
                data = await self._prove(reader, writer)
                writer.write(encode(self._hello()))
                messages = frames.feed(data)
                while not messages:
                    messages = frames.feed(await _some(reader))
            if not isinstance(messages[0], AgentWelcome | EndAgent):
                raise WireError(f"{type(messages[0]).__name__} in place of a welcome")
            self._welcomed(writer)
            while True:
                for message in messages:
                    self._receive(message)
                messages = frames.feed(await _some(reader))
        finally:
            if self._writer is None:
                writer.transport.abort()
            else:
                writer.close()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Prove the secret and see it proved. Returns what came after the proof.

        At first a refusal is a mistake of the person who started this; later it may be anything.
        """
        nonce = os.urandom(NONCE_BYTES)
        handshake = Handshake(self._target.secret, Role.AGENT, nonce, {Role.COORDINATOR}, initiator=True)
        writer.write(handshake.opening())
        try:
            while not handshake.done:
                writer.write(handshake.feed(await _some(reader)))
        except WireError as error:
            if self._known:
                raise
            raise UsageError(f"{self._target}: {error}; name the coordinator's address and secret") from error
        except (OSError, EOFError) as error:
            if self._known or not handshake.waiting_for_proof:
                raise
            raise UsageError(
                f"{self._target}: the coordinator refused this secret; give every node the same --secret file"
            ) from error
        return handshake.rest

    def _welcomed(self, writer: asyncio.StreamWriter) -> None:
        if self._known:
            self._say(f"the coordinator at {self._target} is back")
        self._writer = writer
        self._known = True
        writer.writelines(self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(_CHUNK)
    if not data:
        raise EOFError("the coordinator closed the connection")
    return data


def _give_up_on_silence(sock: socket.socket) -> None:
    """Without this a host that vanished would be noticed after a quarter of an hour."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S / 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SILENT_S / 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))

"""The agent's end of the socket to one worker, without waiting for either direction."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from perdure.schema.errors import WireError
from perdure.schema.wire import Splitter

UNREAD_BYTES_MAX: Final = 64 * 2**20
"""A worker that leaves more than this unread is broken."""

_CHUNK = 262144


class Control:
    """Bodies of frames come in through `on_body`; it may raise WireError.

    `on_broken` is told once why nothing can be exchanged any more; a worker that just closes its end is
    not broken: its exit tells the rest.
    """

    def __init__(
        self, sock: socket.socket, on_body: Callable[[bytes], None], on_broken: Callable[[str], None]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_body = on_body
        self._on_broken = on_broken
        self._splitter = Splitter()
        self._unsent = bytearray()
        self._reading = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    def write(self, data: bytes) -> None:
        """Send `data`, now or as soon as the worker takes it."""
        if not self._unsent:
            data = data[self._send(data) :]
            if data:
                self._loop.add_writer(self._socket, self._write_on)
        self._unsent += data
        if len(self._unsent) > UNREAD_BYTES_MAX:
            self._stop_writing()
            self._break(f"it left {UNREAD_BYTES_MAX} bytes of messages unread")

    def drain(self) -> None:
        """Take everything that a dead worker left in the socket."""
        while self._reading and self._read():
            pass

    def close(self) -> None:
        """End both directions."""
        self._stop_reading()
        self._stop_writing()
        self._socket.close()

    def _read(self) -> bool:
        """Whether something came."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._stop_reading()
            return False
        try:
            for body in self._splitter.feed(data):
                self._on_body(body)
        except WireError as error:
            self._break(str(error))
        return True

    def _send(self, data: bytes | bytearray) -> int:
        """Bytes sent. What a dead or dying worker cannot take is dropped: its exit is told anyway."""
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _write_on(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _break(self, reason: str) -> None:
        self._stop_reading()
        self._on_broken(reason)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)

    def _stop_writing(self) -> None:
        self._unsent.clear()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)

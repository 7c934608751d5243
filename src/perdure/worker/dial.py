"""Connecting to a peer that may not be there yet."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time

from perdure.schema.errors import WireError
from perdure.schema.plan import Address
from perdure.worker.forked import close_in_children
from perdure.worker.handshake import Calling, Hello

HANDSHAKE_S = 2.0
_BACKOFF_S = 0.02
_BACKOFF_S_MAX = 1.0


class Dialer:
    """Tries until it is abandoned: connect, prove the secret, and hand the socket over.

    It never blocks. Its owner registers `sock` with epoll for `events` whenever it changes, calls `on_event`
    when it is ready and `on_time` at `deadline`.
    """

    def __init__(self, address: Address, secret: bytes, hello: Hello) -> None:
        self._address = address
        self._secret = secret
        self._hello = hello
        self._backoff_s = _BACKOFF_S
        self._calling: Calling | None = None
        self._where: _Resolved | None = None
        self.sock: socket.socket | None = None
        self.events = 0
        self.deadline = 0.0
        self.reason = "not tried yet"

    def on_time(self, now: float) -> None:
        """The deadline has passed: the pause between two tries is over, or a try took too long."""
        if self.sock is not None:
            self._failed(now, "no answer in time")
            return
        self._calling = None
        try:
            # Once only: addresses are numeric, but a name would cost a query each time.
            self._where = self._where or _resolve(self._address)
            family, kind, protocol, _, where = self._where
            self.sock = close_in_children(socket.socket(family, kind, protocol))
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self.sock.connect_ex(where)
        except OSError as error:
            self._failed(now, str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._failed(now, os.strerror(code))
            return
        self.deadline = now + HANDSHAKE_S
        self.events = select.EPOLLOUT

    def on_event(self, now: float) -> socket.socket | None:
        """The socket is ready; returns it once the peer has proved itself. It is then the caller's."""
        assert self.sock is not None
        try:
            return self._progress(self.sock)
        except (OSError, WireError) as error:
            self._failed(now, str(error))
            return None

    def _progress(self, sock: socket.socket) -> socket.socket | None:
        if self._calling is None:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._calling = Calling(self._secret, self._hello)
            sock.sendall(self._calling.start)
            self.events = select.EPOLLIN
            return None
        data = sock.recv(self._calling.wants)
        if not data:
            raise WireError("the peer closed the connection during the handshake")
        answer = self._calling.feed(data)
        if answer:
            sock.sendall(answer)
        if not self._calling.done:
            return None
        self.sock = None
        self.deadline = float("inf")
        return sock

    def retry(self, now: float) -> None:
        """The connection that was handed over came to nothing: start again, after a pause."""
        self._failed(now, "the peer was not ready")

    def _failed(self, now: float, reason: str) -> None:
        self.close()
        self.reason = reason
        self.deadline = now + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, _BACKOFF_S_MAX)

    def close(self) -> None:
        """Give up the try in progress."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def connect(address: Address, secret: bytes, hello: Hello, timeout_s: float) -> socket.socket:
    """Connect once, blocking: the joiner's way to a donor. Raises OSError or WireError."""
    sock = close_in_children(socket.create_connection((address.host, address.port), timeout_s))
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + timeout_s
        calling = Calling(secret, hello)
        sock.sendall(calling.start)
        while not calling.done:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            data = sock.recv(calling.wants)
            if not data:
                raise WireError("the peer closed the connection during the handshake")
            answer = calling.feed(data)
            if answer:
                sock.sendall(answer)
        sock.settimeout(None)
        undo.pop_all()
    return sock


_Resolved = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]


def _resolve(address: Address) -> _Resolved:
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]

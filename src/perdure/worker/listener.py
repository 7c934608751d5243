"""One listening socket for a worker's whole life: peers' meshes and joiners connect here.

    accept → handshake (bounded) → hello ─┬─ mesh, its Mesh exists → Mesh.adopt
                                          ├─ mesh, newer than any  → parked until its Mesh exists
                                          ├─ mesh, older           → closed
                                          └─ heal                  → on_heal(socket, hello)

A stranger costs a socket for two seconds and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from perdure.schema.errors import UsageError, WireError
from perdure.schema.ids import NONE, Generation, WorkerId
from perdure.worker import defect
from perdure.worker.dial import HANDSHAKE_S
from perdure.worker.forked import close_in_children
from perdure.worker.handshake import HEAL, MESH, Answering, Hello
from perdure.worker.waker import Waker

_GREETED_MAX = 256
_PARKED_MAX = 1024
# Out of descriptors the listening socket stays readable: this keeps the thread from spinning.
_ACCEPT_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class Adopter(Protocol):
    """Takes the connections of its generation."""

    generation: Generation

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Take an authenticated connection; called on any thread, and does not block."""


class _Guest(NamedTuple):
    """A connection that has not proved the secret yet."""

    sock: socket.socket
    name: str
    answering: Answering
    deadline: float


class Listener:
    """Accepts, authenticates and deals out connections, on a thread of its own.

    `on_heal` is called on that thread with an open, blocking socket that is then its own; it must not block.
    `on_stranger` is told there who was refused, and why; without it that is logged.
    Raises UsageError when `host` is not an address of this machine.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        me: WorkerId,
        on_heal: Callable[[socket.socket, Hello], None],
        on_stranger: Callable[[str, str], None] | None = None,
    ) -> None:
        self.secret = secret
        self._me = me
        self._on_heal = on_heal
        self._on_stranger = on_stranger or _log_stranger
        self._lock = threading.Lock()
        self._meshes: dict[Generation, Adopter] = {}
        self._parked: dict[tuple[Generation, WorkerId], tuple[socket.socket, Hello]] = {}
        self._newest = NONE
        self._greeted: dict[int, _Guest] = {}
        self._stopping = False
        self._closed = False
        self._sock = _listen(host)
        self.host, self.port = self._sock.getsockname()[:2]
        self._epoll = select.epoll()
        self._waker = Waker()
        self._epoll.register(self._sock, select.EPOLLIN)
        self._epoll.register(self._waker.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=defect.fatal(self._run), name="perdure-listener", daemon=True)
        self._thread.start()

    def register(self, mesh: Adopter) -> None:
        """Give `mesh` its generation's connections, those that came before it too.

        Generations only grow: whatever is parked for an older one is dropped.
        """
        with self._lock:
            self._meshes[mesh.generation] = mesh
            self._newest = max(self._newest, mesh.generation)
            old = [key for key in self._parked if key[0] <= self._newest]
            taken = [(key, self._parked.pop(key)) for key in old]
        for (generation, _), (sock, hello) in taken:
            if generation == mesh.generation:
                mesh.adopt(sock, hello)
            else:
                sock.close()

    def unregister(self, mesh: Adopter) -> None:
        """`mesh` takes no more connections."""
        with self._lock:
            if self._meshes.get(mesh.generation) is mesh:
                del self._meshes[mesh.generation]

    def close(self) -> None:
        """Stop listening, drop what was not handed over, end the thread. Idempotent."""
        self._stopping = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping:
                for number, _ in self._epoll.poll(self._patience()):
                    if number == self._sock.fileno():
                        self._accept()
                    elif number in self._greeted:
                        self._greet(number)
                self._expire()
        finally:
            self._dispose()

    def _patience(self) -> float | None:
        if not self._greeted:
            return None
        soonest = min(guest.deadline for guest in self._greeted.values())
        return max(soonest - time.monotonic(), 0.0)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, or the caller has gone already: neither may end the listener.
                _log.warning("could not accept a connection: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
                return
            close_in_children(sock)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._greeted) >= _GREETED_MAX:
                self._refuse(next(iter(self._greeted)), "too many connections at once")
            deadline = time.monotonic() + HANDSHAKE_S
            name = "{}:{}".format(*address[:2])
            self._greeted[sock.fileno()] = _Guest(sock, name, Answering(self.secret), deadline)
            self._epoll.register(sock, select.EPOLLIN)

    def _greet(self, number: int) -> None:
        sock, _, answering, _ = self._greeted[number]
        try:
            data = sock.recv(answering.wants)
            answer = answering.feed(data)
            if answer:
                sock.sendall(answer)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except WireError as error:
            self._refuse(number, str(error))
            return
        if not data:  # it went away by itself: a peer that died just now, as a rule
            self._drop(number)
            return
        if answering.hello is not None:
            del self._greeted[number]
            self._epoll.unregister(number)
            self._deal(sock, answering.hello)

    def _refuse(self, number: int, reason: str) -> None:
        name = self._drop(number)
        self._on_stranger(name, reason)

    def _drop(self, number: int) -> str:
        guest = self._greeted.pop(number)
        self._epoll.unregister(number)
        guest.sock.close()
        return guest.name

    def _expire(self) -> None:
        now = time.monotonic()
        late = [number for number, guest in self._greeted.items() if guest.deadline <= now]
        for number in late:
            self._refuse(number, "it did not prove the secret in time")

    def _deal(self, sock: socket.socket, hello: Hello) -> None:
        if hello.listener != self._me:
            # The port was another worker's before it was ours.
            sock.close()
        elif hello.kind == HEAL:
            sock.setblocking(True)
            self._on_heal(sock, hello)
        elif hello.kind == MESH:
            self._deal_mesh(sock, hello)
        else:
            sock.close()

    def _deal_mesh(self, sock: socket.socket, hello: Hello) -> None:
        unwanted: socket.socket | None = None
        with self._lock:
            mesh = self._meshes.get(hello.generation)
            if mesh is None and hello.generation > self._newest:
                key = (hello.generation, hello.caller)
                old = self._parked.pop(key, None)
                if old is None and len(self._parked) >= _PARKED_MAX:
                    old = self._parked.pop(next(iter(self._parked)))
                unwanted = None if old is None else old[0]
                self._parked[key] = (sock, hello)
            elif mesh is None:
                unwanted = sock
        if mesh is not None:
            mesh.adopt(sock, hello)
        if unwanted is not None:
            unwanted.close()

    def _dispose(self) -> None:
        with self._lock:
            parked = [sock for sock, _ in self._parked.values()]
            self._parked.clear()
        for sock in [*parked, *(guest.sock for guest in self._greeted.values())]:
            sock.close()
        self._greeted.clear()
        self._sock.close()
        self._epoll.close()
        self._waker.close()


def _log_stranger(name: str, reason: str) -> None:
    _log.warning("refused a connection from %s: %s", name, reason)


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(where[:2], family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host!r}: {error}; give an address of this machine that its peers can reach"
        ) from error
    sock.setblocking(False)
    return close_in_children(sock)

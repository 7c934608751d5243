"""A generation's group over connections of its own: one for every pair of members, one thread for all.

    1. Of two members the one of lower rank connects (`dial`), the other's Listener hands the socket over.
    2. Both say HELLO; each tries to read the other's memory where HELLO says, and answers READY.
       A pair whose HELLO and READY have gone both ways is up; when all are, the mesh is formed. As only
       an existing Mesh says HELLO, formed means that every peer has made its own for this generation.
    3. A payload for a peer that can read this memory is OFFERed: the peer copies it from where it lies and
       answers TAKEN. Any other goes INLINE, straight from the tensor to the socket. An offer that the
       kernel will not read after all is answered SEND, and sent inline.
    4. `interrupt` ends it at once. `retire` ends it after everything sent has arrived: BYE, then the
       sending half is shut, then the peer's end of stream is awaited.

Between TCP's flow control and the queue of `channel.Channel` nothing here blocks, so an interrupt never
waits for a peer. A connection that fails before HELLO is tried again until the mesh is abandoned, because
the peer may be starting; after HELLO a failure is a loss and final (P11).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from perdure.schema.errors import ProtocolError, WireError
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address
from perdure.worker import frames, pull
from perdure.worker.channel import Buffer, Channel
from perdure.worker.dial import Dialer
from perdure.worker.frames import Head, Kind
from perdure.worker.handshake import MESH, Hello
from perdure.worker.listener import Listener
from perdure.worker.memory import Pieces
from perdure.worker.peer import Offered, Peer
from perdure.worker.transport import LATER, Bulk, Handlers
from perdure.worker.waker import Waker

# Below this an offer and its answer cost more than the copies they save.
_OFFER_BYTES_MIN = 16 << 10


class Mesh:
    """One `Transport` (see there) over TCP and, between processes of one host, direct reads of memory.

    `members` are in rank order and contain `me`. With `pull` false memory is never read: everything goes
    through the sockets. Raises ProtocolError when `me` is not a member.
    """

    def __init__(
        self,
        generation: Generation,
        me: WorkerId,
        members: Sequence[Address],
        listener: Listener,
        handlers: Handlers,
        pull: bool = True,
    ) -> None:
        ranks = [member.worker for member in members]
        if me not in ranks:
            raise ProtocolError(f"worker {me} is not a member of generation {generation}: {ranks}")
        self.generation = generation
        self._listener = listener
        self._handlers = handlers
        self._pull = pull
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._counts: Counter[int] = Counter()
        self._calls: deque[Callable[[], None]] = deque()
        self._adopted: deque[tuple[socket.socket, WorkerId]] = deque()
        self._dirty: set[Peer] = set()
        self._stopping = False
        self._formed = False
        self._settled = threading.Event()
        self._retire_by: float | None = None
        self._peers = {
            member.worker: Peer(member, self._dialer(me, member) if ranks.index(me) < rank else None)
            for rank, member in enumerate(members)
            if member.worker != me
        }
        self._sockets: dict[int, Peer] = {}
        self._epoll = select.epoll()
        self._waker = Waker()
        self._epoll.register(self._waker.fileno(), select.EPOLLIN)
        self._token = _token()
        self._thread = threading.Thread(target=self._run, name=f"perdure-mesh-{generation}", daemon=True)
        self._thread.start()
        listener.register(self)

    def _dialer(self, me: WorkerId, to: Address) -> Dialer:
        return Dialer(to, self._listener.secret, Hello(MESH, self.generation, me, to.worker))

    # ── any thread ──────────────────────────────────────────────────────────────────────────────────

    def wait_formed(self, timeout_s: float) -> bool:
        """Wait until the group is formed; false when it is not in time, or will never be."""
        self._settled.wait(timeout_s)
        return self._formed and not self._stopping

    @property
    def pulling(self) -> frozenset[WorkerId]:
        """The peers whose memory is read here."""
        return frozenset(worker for worker, peer in self._peers.items() if peer.remote is not None)

    def post(
        self,
        peer: WorkerId,
        header: Bulk,
        buffers: Sequence[memoryview],
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a payload (`Transport.post`); before the peer is up it waits."""
        to = self._peers[peer]
        with self._lock:
            if self._stopping or to.over:
                return
            self._counts[header.step] += 1
            offered = Offered(header, Pieces.of(buffers), on_sent)
            if to.up:
                self._send(to, offered)
            else:
                to.early.append(lambda: self._send(to, offered))
        self._push(to)

    def tell(self, peer: WorkerId, body: bytes) -> None:
        """Send a small message (`Transport.tell`)."""
        to = self._peers[peer]
        frame = frames.control(body)
        with self._lock:
            if self._stopping or to.over:
                return
            if to.up:
                to.push([frame])
            else:
                to.early.append(lambda: to.push([frame]))
        self._push(to)

    def take(self, peer: WorkerId, header: Bulk) -> None:
        """Ask again for the buffer of a payload that was put off."""
        self.submit(lambda: self._take(self._peers[peer], header))

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the mesh's thread soon; dropped once the mesh has stopped."""
        self._calls.append(call)
        if threading.current_thread() is not self._thread:
            self._waker.wake()

    def outstanding(self, step: int) -> int:
        """How many payloads of steps ≤ `step` were posted here and are not known to be sent (P2)."""
        with self._lock:
            return self._outstanding(step)

    def wait_sent(self, step: int, timeout_s: float) -> bool:
        """Wait until nothing of steps ≤ `step` is outstanding; false when it is not in time, or never."""
        with self._sent:
            self._sent.wait_for(lambda: self._stopping or not self._outstanding(step), timeout_s)
            return not self._stopping and not self._outstanding(step)

    def _outstanding(self, step: int) -> int:
        return sum(count for at, count in self._counts.items() if at <= step)

    def interrupt(self) -> None:
        """Tear everything down now; the thread ends within milliseconds and tells nobody of losses."""
        with self._sent:
            self._stopping = True
            self._sent.notify_all()
        self._settled.set()
        self._waker.wake()
        for peer in self._peers.values():
            peer.sever()

    def retire(self, timeout_s: float) -> None:
        """End gracefully in the background; a mesh that was never formed is abandoned at once."""
        if not self._formed:
            self.interrupt()
            return
        deadline = time.monotonic() + timeout_s

        def begin() -> None:
            self._retire_by = deadline

        self.submit(begin)

    def close(self) -> None:
        """Interrupt, and wait until the thread has ended and every descriptor is closed. Idempotent."""
        if threading.current_thread() is self._thread:
            raise ProtocolError("a mesh cannot be closed from its own thread: interrupt it there")
        self.interrupt()
        self._thread.join()

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Take a connection from the Listener."""
        with self._lock:
            taken = not self._stopping
            if taken:
                self._adopted.append((sock, hello.caller))
        if taken:
            self._waker.wake()
        else:
            sock.close()

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────

    def _send(self, to: Peer, offered: Offered) -> None:
        """Put a payload on its way to a peer that is up."""
        pieces = offered.pieces
        if to.reads_here and pieces.nbytes >= _OFFER_BYTES_MIN and len(pieces) <= frames.PIECES_LIMIT:
            to.push([frames.offer(offered.header, to.offer(offered), pieces)])
        else:
            self._inline(to, offered)

    def _inline(self, to: Peer, offered: Offered) -> None:
        parts: list[Buffer] = [frames.inline(offered.header, offered.pieces.nbytes)]
        parts += [view for view in offered.pieces if view.nbytes]
        to.push(parts, lambda: self._complete(offered))

    def _complete(self, offered: Offered) -> None:
        with self._sent:
            self._counts[offered.header.step] -= 1
            if not self._counts[offered.header.step]:
                del self._counts[offered.header.step]
                self._sent.notify_all()
        if offered.on_sent is not None:
            offered.on_sent()

    def _push(self, to: Peer) -> None:
        """Send now from a thread of others; on the mesh's own, what goes to one peer goes together."""
        if threading.current_thread() is self._thread:
            self._dirty.add(to)
        else:
            self._flush(to)

    def _flush(self, to: Peer) -> None:
        channel = to.channel
        if channel is None:
            return
        channel.flush()
        # Whoever comes last sees the newest queue: asking under the lock loses no wake-up.
        with self._lock:
            wanted = not channel.idle
            if wanted != to.writing and to.channel is channel:
                to.writing = wanted
                events = select.EPOLLIN | (select.EPOLLOUT if wanted else 0)
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.modify(channel.sock, events)

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            now = time.monotonic()
            for peer in self._peers.values():
                self._tick(peer, now)
            self._check_formed()
            while not self._stopping:
                for number, events in self._epoll.poll(self._patience()):
                    self._dispatch(number, events)
                self._work()
        except Exception as error:
            self._dispose()
            self._handlers.broken(error)
        else:
            self._dispose()

    def _patience(self) -> float | None:
        if self._calls or self._dirty:
            return 0.0
        deadlines = [peer.dialer.deadline for peer in self._peers.values() if peer.dialer is not None]
        if self._retire_by is not None:
            deadlines.append(self._retire_by)
        soonest = min(deadlines, default=float("inf"))
        return None if soonest == float("inf") else max(soonest - time.monotonic(), 0.0)

    def _dispatch(self, number: int, events: int) -> None:
        if self._stopping:
            return
        if number == self._waker.fileno():
            self._waker.clear()
            return
        peer = self._sockets.get(number)
        if peer is None:
            return
        channel = peer.channel
        if channel is None:
            self._dialing(peer)
            return
        if events & ~select.EPOLLOUT:
            self._receive(peer, channel)
        if events & select.EPOLLOUT:
            self._dirty.add(peer)
        while self._dirty:
            self._flush(self._dirty.pop())

    def _work(self) -> None:
        """What is due after the sockets: submitted calls, timers, the steps of retiring."""
        while self._adopted:
            self._connected(*self._adopted.popleft())
        for _ in range(len(self._calls)):
            if self._stopping:
                return
            self._calls.popleft()()
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.dialer is not None and peer.dialer.deadline <= now:
                self._tick(peer, now)
        if self._retire_by is not None:
            self._retire(self._retire_by <= now)
        while self._dirty:
            self._flush(self._dirty.pop())

    def _dispose(self) -> None:
        self.interrupt()
        self._listener.unregister(self)
        for peer in self._peers.values():
            self._forget(peer)
        for sock, _ in self._adopted:
            sock.close()
        self._calls.clear()
        self._epoll.close()
        self._waker.close()

    # ── forming ─────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, peer: Peer, now: float) -> None:
        if peer.dialer is not None:
            self._unwatch(peer)
            peer.dialer.on_time(now)
            self._watch(peer, peer.dialer)

    def _dialing(self, peer: Peer) -> None:
        assert peer.dialer is not None
        # Out of epoll first: a try that fails closes its socket, and the number may be another's next.
        self._unwatch(peer)
        sock = peer.dialer.on_event(time.monotonic())
        if sock is not None:
            self._connected(sock, peer.address.worker)
        else:
            self._watch(peer, peer.dialer)

    def _watch(self, peer: Peer, dialer: Dialer) -> None:
        if dialer.sock is not None:
            self._sockets[dialer.sock.fileno()] = peer
            self._epoll.register(dialer.sock, dialer.events)

    def _unwatch(self, peer: Peer) -> None:
        for number in [number for number, other in self._sockets.items() if other is peer]:
            del self._sockets[number]
            with contextlib.suppress(OSError):
                self._epoll.unregister(number)

    def _connected(self, sock: socket.socket, worker: WorkerId) -> None:
        peer = self._peers.get(worker)
        if self._stopping or peer is None or peer.heard or peer.over:
            sock.close()
            return
        self._unwatch(peer)
        peer.connect(Channel(sock, worker, self))
        self._sockets[sock.fileno()] = peer
        self._epoll.register(sock, select.EPOLLIN)
        peer.push([frames.hello(os.getpid(), self._token.address, self._token.value)])
        self._dirty.add(peer)

    def _check_formed(self) -> None:
        if not self._formed and all(peer.up for peer in self._peers.values()):
            self._formed = True
            self._settled.set()
            self._handlers.formed()

    # ── receiving ───────────────────────────────────────────────────────────────────────────────────

    def _receive(self, peer: Peer, channel: Channel) -> None:
        try:
            if channel.receive():
                return
            reason = "the connection was closed"
        except (OSError, WireError, pull.GoneError) as error:
            reason = str(error)
        self._lose(peer, reason)

    def arrived(self, channel: Channel, head: Head, tail: bytes) -> memoryview | None:
        """A frame of a peer (`channel.Sink`)."""
        peer = self._peers[channel.peer]
        match head.frame:
            case Kind.INLINE if peer.heard:
                view = self._handlers.buffer(channel.peer, head.bulk(tail), head.length, False)
                if view is LATER or (view is not None and view.nbytes != head.length):
                    raise ProtocolError(f"{head.length} bytes from worker {channel.peer} got {view!r}")
                return view
            case Kind.OFFER if peer.remote is not None:
                self._offered(peer, head, tail)
            case Kind.TAKEN:
                self._complete(peer.settle(head.ticket))
            case Kind.SEND:
                self._inline(peer, peer.settle(head.ticket))
                self._dirty.add(peer)
            case Kind.CONTROL if peer.heard:
                self._handlers.control(channel.peer, tail)
            case Kind.HELLO:
                self._greeted(peer, tail)
            case Kind.READY:
                self._ready(peer, head.kind == 1)
            case Kind.BYE:
                peer.left = True
            case _:
                raise WireError(f"frame {head.frame} out of place")
        return None

    def filled(self, channel: Channel, head: Head, tail: bytes, view: memoryview) -> None:
        """An INLINE payload is complete (`channel.Sink`)."""
        self._handlers.bulk(channel.peer, head.bulk(tail), view)

    def _greeted(self, peer: Peer, tail: bytes) -> None:
        if peer.heard:
            raise WireError("a second HELLO")
        peer.heard = True
        if self._pull:
            peer.remote = pull.open_remote(*frames.parse_hello(tail))
        peer.push([frames.signal(Kind.READY, 1 if peer.remote is not None else 0)])
        self._ready(peer, None)

    def _ready(self, peer: Peer, reads_here: bool | None) -> None:
        with self._lock:
            peer.ready(reads_here)
        self._dirty.add(peer)
        self._check_formed()

    def _offered(self, peer: Peer, head: Head, tail: bytes) -> None:
        """A payload lies in the peer's memory: read it, put it off, or let it go."""
        assert peer.remote is not None
        worker, header = peer.address.worker, head.bulk(tail)
        view = self._handlers.buffer(worker, header, head.length, True)
        if view is LATER:
            peer.waiting[header] = (head, tail)
            return
        answer = Kind.TAKEN
        if view is not None:
            if view.nbytes != head.length:
                raise ProtocolError(f"{head.length} bytes from worker {worker} got a place of {view.nbytes}")
            try:
                peer.remote.read(tail[head.meta :], view)
            except pull.UnreadableError:
                answer = Kind.SEND
        peer.push([frames.answer(answer, head.ticket)])
        self._dirty.add(peer)
        if view is not None and answer == Kind.TAKEN:
            self._handlers.bulk(worker, header, view)

    def _take(self, peer: Peer, header: Bulk) -> None:
        waiting = peer.waiting.pop(header, None)
        if waiting is None or peer.over:
            return
        try:
            self._offered(peer, *waiting)
        except pull.GoneError as error:
            self._lose(peer, str(error))

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._stopping or peer.channel is None:
            return
        heard, unsent = peer.heard, peer.channel.unsent()
        self._forget(peer)
        if not heard:
            if peer.dialer is not None:
                peer.dialer.retry(time.monotonic())
            return
        with self._lock:
            peer.over = True
            offers = peer.abandon()
        if peer.left:
            # It went on purpose and wants nothing more: what it did not take counts as sent.
            for offered in offers:
                self._complete(offered)
            for done in unsent:
                done()
        elif self._retire_by is None:
            self._handlers.lost(peer.address.worker, reason)

    def _forget(self, peer: Peer) -> None:
        self._unwatch(peer)
        with self._lock:
            peer.disconnect()

    def _retire(self, late: bool) -> None:
        if late or all(peer.over for peer in self._peers.values()):
            self.interrupt()
            return
        for peer in self._peers.values():
            channel = peer.channel
            if channel is None or peer.offers or peer.finished:
                continue
            if not peer.said_bye:
                peer.said_bye = True
                peer.push([frames.signal(Kind.BYE)])
                self._flush(peer)
            if channel.idle:
                peer.finished = True
                channel.finish_sending()


def _token() -> pull.Token:
    pull.permit_siblings()
    return pull.Token()

"""State from a live replica: a joiner takes it from several donors while these go on computing.

    joiner ── HEAL connection ──▶ donor        authenticated by the listener's handshake
    Ask(step, digest)              ▶           `digest`: what the joiner has already
                                   ◀  Offer(session, description, records) or Same or No(reason)
    Want(index) …                  ▶           a few ahead, so that the connection never idles
                                   ◀  the chunk's bytes, in the order asked for

A donor's state cannot change meanwhile: its next commit needs the joiner's header, which the joiner sends
only when its own state is complete and verified (P15). Sessions are keyed by (step, digest) (P14).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from perdure.schema import messages as msg
from perdure.schema.errors import ProtocolError, RestoreError, WireError
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Address, Plan, Record
from perdure.state.transfer import Chunk, Donor, Receiver, Session
from perdure.worker import defect
from perdure.worker.dial import connect
from perdure.worker.handshake import HEAL, Hello
from perdure.worker.runtime import Runtime

CONNECT_S = 5.0
IDLE_S = 20.0
AHEAD = 4
_LENGTH = struct.Struct("<I")
_LIMIT = 64 << 20


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The state after `step`, please."""

    step: int
    digest: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Here it is described; `records` are lines of metrics that are not known to be written yet (P18)."""

    session: Session
    description: bytes
    records: tuple[Record, ...]


class Same(msgspec.Struct, frozen=True, tag=True):
    """You have it already."""

    records: tuple[Record, ...]


class No(msgspec.Struct, frozen=True, tag=True):
    """Not from here."""

    reason: str


class Want(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a chunk."""

    index: int


_BROKEN = (OSError, WireError, msgspec.DecodeError)
_FROM_DONOR = msgspec.msgpack.Decoder(Offer | Same | No)
_FROM_JOINER = msgspec.msgpack.Decoder(Ask | Want)


class Desk:
    """The donor's side: serves joiners on threads of their own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._donor: Donor | None = None

    def on_heal(self, sock: socket.socket, hello: Hello) -> None:
        """A joiner connected (called by the listener; must not block)."""
        serve = defect.fatal(self._serve)
        threading.Thread(target=serve, args=(sock,), name="perdure-donor", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(*_BROKEN, ProtocolError), contextlib.closing(sock):
            sock.settimeout(IDLE_S)
            ask = _FROM_JOINER.decode(_receive(sock))
            if not isinstance(ask, Ask):
                raise WireError("a joiner has to ask first")
            donor, answer = self._answer(ask)
            _send(sock, answer)
            while donor is not None:
                want = _FROM_JOINER.decode(_receive(sock))
                views = donor.read_views(donor.session, want.index) if isinstance(want, Want) else None
                if views is None:
                    return
                for view in views:
                    sock.sendall(view)

    def _answer(self, ask: Ask) -> tuple[Donor | None, Offer | Same | No]:
        runtime = self._runtime
        with runtime.lock:
            member = runtime.member
            holds = member.committed == ask.step and not member.committing and not member.healing
            records = tuple(member.records.values())
        if not holds:
            return None, No(f"this worker is not at step {ask.step}")
        with self._lock:
            if self._donor is None or self._donor.session.step != ask.step:
                self._donor = runtime.training.donor(ask.step)
            donor = self._donor
        if donor.session.digest == ask.digest:
            return None, Same(records)
        return donor, Offer(donor.session, donor.description, records)

    def forget(self) -> None:
        """The state changes: what was offered is void."""
        with self._lock:
            self._donor = None


@dataclass
class _Line:
    """A connection to one donor."""

    worker: WorkerId
    sock: socket.socket
    offer: Offer


class Patient:
    """The joiner's side. Keeps what arrived across generations, as long as the session is the same."""

    def __init__(self, runtime: Runtime, secret: bytes) -> None:
        self._runtime = runtime
        self._secret = secret
        self._receiver = Receiver(runtime.training.state, staged=True)
        self._own: str | None = None

    def heal(self, plan: Plan, step: int) -> None:
        """Take the state after `step`; returns when it is in place, or when the plan is superseded."""
        started = time.monotonic()
        digest = self._own = self._own or self._runtime.training.digest_now()
        lines, same = self._open_lines(plan, step, digest)
        try:
            if same is not None:
                self._done(plan, step, 0, started, digest, same.records)
                return
            if not lines:
                return
            session, records = lines[0].offer.session, lines[0].offer.records
            nbytes = self._begin(plan, step, lines)
            self._take(lines)
            if not self._receiver.missing():
                healed = self._receiver.finish()
                self._runtime.training.restored()
                self._own = healed
                assert healed == session.digest
                self._done(plan, step, nbytes, started, healed, records)
        except RestoreError as error:
            self._runtime.tell(msg.HealFailed(plan.generation, str(error)))
            self._runtime.wait_for(lambda: self._over(plan))
        finally:
            for line in lines:
                line.sock.close()

    def _open_lines(self, plan: Plan, step: int, digest: str) -> tuple[list[_Line], Same | None]:
        lines: list[_Line] = []
        for donor in plan.donors:
            if donor.worker == self._runtime.member.worker:
                continue
            answer, sock = self._ask(donor, plan, step, digest)
            if isinstance(answer, Same) and sock is not None:
                sock.close()
                for line in lines:
                    line.sock.close()
                return [], answer
            if isinstance(answer, Offer) and sock is not None:
                lines.append(_Line(donor.worker, sock, answer))
            elif sock is not None:
                sock.close()
        agreed = [line for line in lines if line.offer.session == lines[0].offer.session]
        for line in lines:
            if line not in agreed:
                line.sock.close()
        return agreed, None

    def _ask(
        self, donor: Address, plan: Plan, step: int, digest: str
    ) -> tuple[Offer | Same | No | None, socket.socket | None]:
        hello = Hello(HEAL, plan.generation, self._runtime.member.worker, donor.worker)
        try:
            sock = connect(donor, self._secret, hello, CONNECT_S)
        except (OSError, WireError):
            return None, None
        try:
            sock.settimeout(IDLE_S)
            _send(sock, Ask(step, digest))
            return _FROM_DONOR.decode(_receive(sock)), sock
        except _BROKEN:
            sock.close()
            return None, None

    def _begin(self, plan: Plan, step: int, lines: Sequence[_Line]) -> int:
        offer = lines[0].offer
        self._receiver.begin(offer.session, offer.description)
        nbytes = sum(chunk.length for chunk in self._receiver.missing())
        donors = tuple(line.worker for line in lines)
        self._runtime.tell(msg.HealStarted(plan.generation, step, nbytes, donors))
        return nbytes

    def _take(self, lines: Sequence[_Line]) -> None:
        """All lines at once, each taking the next chunk that nobody has asked for."""
        todo: deque[Chunk] = deque(self._receiver.missing())
        take = defect.fatal(self._take_from)
        threads = [
            threading.Thread(target=take, args=(line, todo), name="perdure-heal", daemon=True)
            for line in lines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take_from(self, line: _Line, todo: deque[Chunk]) -> None:
        asked: deque[Chunk] = deque()
        session = line.offer.session
        try:
            while True:
                while len(asked) < AHEAD and todo:
                    with contextlib.suppress(IndexError):
                        asked.append(todo.popleft())
                        _send(line.sock, Want(asked[-1].index))
                if not asked:
                    return
                chunk = asked[0]
                view = self._receiver.buffer(session, chunk.index)
                _fill(line.sock, view if view is not None else memoryview(bytearray(chunk.length)))
                self._receiver.landed(session, chunk.index)
                asked.popleft()
        except (OSError, WireError):
            todo.extend(asked)  # the other lines take them

    def _done(
        self, plan: Plan, step: int, nbytes: int, started: float, digest: str, records: Sequence[Record]
    ) -> None:
        runtime = self._runtime
        with runtime.lock:
            if self._over(plan):
                return
            for record in records:
                runtime.member.records.setdefault(record.step, record)
            runtime.perform(runtime.member.healed(digest))
        seconds = time.monotonic() - started
        runtime.tell(msg.Healed(plan.generation, step, nbytes, seconds, "replica"))

    def _over(self, plan: Plan) -> bool:
        current = self._runtime.member.plan
        return current is None or current.generation != plan.generation


def _send(sock: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    header = bytearray(_LENGTH.size)
    _fill(sock, memoryview(header))
    (length,) = _LENGTH.unpack(header)
    if length > _LIMIT:
        raise WireError(f"a message of {length} bytes, more than {_LIMIT}")
    body = bytearray(length)
    _fill(sock, memoryview(body))
    return bytes(body)


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
        if count == 0:
            raise WireError("the connection was closed")
        view = view[count:]

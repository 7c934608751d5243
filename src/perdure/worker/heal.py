"""State from a live replica: a joiner takes it from several donors while these go on computing.

    joiner ── HEAL connection ──▶ donor        authenticated by the listener's handshake
    HowLarge                       ▶           while it waits to be let in: it makes room
                                   ◀  Size(nbytes)
    Ask(step, digest)              ▶           `digest`: what the joiner has already, if it may be that
                                   ◀  Offer(session, description, records, memory) or Same or No(reason)
    (reads the donor's memory)                 on the same host, where the kernel lets it (`pull`); else
    Want(index) …                  ▶           a few ahead, so that the connection never idles
                                   ◀  the chunk's bytes, in the order asked for
    Check                          ▶           one donor is asked, while the bytes are on their way
                                   ◀  Checked(digest)

All donors are asked at once. A donor's state cannot change meanwhile: its next commit needs the joiner's
header, which the joiner sends only when its own state is complete and verified (P15). Sessions are keyed by
(step, digest) (P14); a worker that has just started takes the bytes before it knows the digest, and if it
then does not match, because a donor differs from the others, all again from donors that agree in it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.schema import messages as msg
from perdure.schema.errors import ProtocolError, RestoreError, WireError
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address, Plan, Record
from perdure.state.transfer import Chunk, Donor, Receiver, Session
from perdure.worker import defect, pull
from perdure.worker.dial import connect
from perdure.worker.handshake import HEAL, Hello
from perdure.worker.runtime import Runtime

CONNECT_S = 5.0
IDLE_S = 20.0
COMMIT_S = 10.0
"""A donor that is still in its commit when it is asked has so long to finish it."""
AHEAD = 4
_LENGTH = struct.Struct("<I")
_LIMIT = 64 << 20


class HowLarge(msgspec.Struct, frozen=True, tag=True):
    """How much will there be to take?"""


class Size(msgspec.Struct, frozen=True, tag=True):
    """About as much: the bytes of the state when it was last walked."""

    nbytes: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The state after `step`, please."""

    step: int
    digest: str


class Memory(msgspec.Struct, frozen=True):
    """Where the state lies in the donor's process: an address for each tensor of the description, 0 for none.

    `token` lies at `token_at` there, for whoever can read it.
    """

    pid: int
    token_at: int
    token: bytes
    tensors: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Here it is described; `records` are lines of metrics that are not known to be written yet (P18)."""

    session: Session
    description: bytes
    records: tuple[Record, ...]
    memory: Memory


class Same(msgspec.Struct, frozen=True, tag=True):
    """You have it already."""

    records: tuple[Record, ...]


class No(msgspec.Struct, frozen=True, tag=True):
    """Not from here."""

    reason: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """What is the digest of the state offered?"""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Taken anew."""

    digest: str


class Want(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a chunk."""

    index: int


_BROKEN = (OSError, WireError, msgspec.DecodeError)
_FROM_DONOR = msgspec.msgpack.Decoder(Offer | Same | No | Size | Checked)
_FROM_JOINER = msgspec.msgpack.Decoder(Ask | HowLarge | Want | Check)


class Desk:
    """The donor's side: serves joiners on threads of their own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._digesting = threading.Lock()
        self._donor: Donor | None = None
        pull.permit_siblings()
        self._token = pull.Token()

    def on_heal(self, sock: socket.socket, hello: Hello) -> None:
        """A joiner connected (called by the listener; must not block)."""
        serve = defect.fatal(self._serve)
        threading.Thread(target=serve, args=(sock,), name="perdure-donor", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(*_BROKEN, ProtocolError), contextlib.closing(sock):
            sock.settimeout(IDLE_S)
            ask = _FROM_JOINER.decode(_receive(sock))
            if isinstance(ask, HowLarge):
                _send(sock, Size(self._runtime.training.state.known_bytes))
                return
            if not isinstance(ask, Ask):
                raise WireError("a joiner has to ask first")
            donor, answer = self._answer(ask)
            _send(sock, answer)
            while donor is not None:
                want = _FROM_JOINER.decode(_receive(sock))
                if isinstance(want, Check):
                    _send(sock, Checked(self._digest(donor)))
                    continue
                views = donor.read_views(donor.session, want.index) if isinstance(want, Want) else None
                if views is None:
                    return
                for view in views:
                    sock.sendall(view)

    def _answer(self, ask: Ask) -> tuple[Donor | None, Offer | Same | No]:
        runtime = self._runtime
        member = runtime.member

        def on_the_way() -> bool:
            return not member.healing and (member.committed < ask.step or member.committing)

        with runtime.lock:
            # The joiner may be quicker than this worker's optimizer.
            runtime.changed.wait_for(lambda: not on_the_way(), COMMIT_S)
            holds = member.committed == ask.step and not on_the_way() and not member.healing
            records = tuple(member.records.values())
        if not holds:
            return None, No(f"this worker is not at step {ask.step}")
        try:
            with self._lock:
                if self._donor is None or self._donor.session.step != ask.step:
                    self._donor = runtime.training.donor(ask.step)
                donor = self._donor
        except Exception:
            with runtime.lock:
                if member.committed == ask.step and not (member.committing or member.healing):
                    raise
            # The joiner is not waited for any more: the optimizer was at work on what was walked through.
            return None, No(f"this worker is not at step {ask.step} any more")
        if ask.digest and self._digest(donor) == ask.digest:
            return None, Same(records)
        memory = Memory(os.getpid(), self._token.address, self._token.value, donor.addresses)
        return donor, Offer(donor.session, donor.description, records, memory)

    def _digest(self, donor: Donor) -> str:
        """The digest of the state that is given; taken once, however many joiners there are."""
        with self._digesting:
            if not donor.session.digest:
                donor.session = Session(donor.session.step, donor.digest())
            return donor.session.digest

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
    remote: pull.Remote | None
    talk: threading.Lock = field(default_factory=threading.Lock)
    """Who holds it asks and is answered."""

    def read(self, chunk: Chunk, into: memoryview) -> None:
        """Read a chunk from the donor's memory. Raises GoneError, UnreadableError."""
        assert self.remote is not None
        at = self.offer.memory.tensors
        if not all(at[piece.tensor] for piece in chunk.pieces):
            raise pull.UnreadableError("not in host memory")
        places = [n for piece in chunk.pieces for n in (at[piece.tensor] + piece.offset, piece.length)]
        self.remote.read(struct.pack(f"={len(places)}Q", *places), into)

    def close(self) -> None:
        """Let go of the donor."""
        self.sock.close()
        if self.remote is not None:
            self.remote.close()


class Patient:
    """The joiner's side. Keeps what arrived across generations, as long as the session is the same."""

    def __init__(self, runtime: Runtime, secret: bytes) -> None:
        self._runtime = runtime
        self._secret = secret
        self._receiver = Receiver(runtime.training.state)
        self._own, self._own_at = "", 0
        self._asked: Generation | None = None
        self._taken_bytes, self._taken_s = 0, 0.0  # since this worker was last healed, over generations

    def can_prepare(self) -> bool:
        """Whether a generation is on offer that would let this worker in, and no room was made for it yet."""
        plan, me = self._runtime.member.prepared, self._runtime.member.worker
        return plan is not None and plan.generation != self._asked and me in plan.joiners

    def prepare(self, hurry: Callable[[], bool]) -> None:
        """Make room for the state that is to come, and take the digest of what is here; until `hurry`."""
        with self._runtime.lock:
            plan = self._runtime.member.prepared
        if plan is None:
            return
        self._asked = plan.generation
        if self._may_have(plan.base):
            self._own_digest()
        for donor in plan.members:
            if donor.worker in plan.joiners:
                continue
            answer, sock = self._ask(donor, plan, HowLarge())
            if sock is not None:
                sock.close()
            if isinstance(answer, Size):
                self._receiver.reserve(answer.nbytes, hurry)
                return

    def heal(self, plan: Plan, step: int) -> None:
        """Take the state after `step`; returns when it is in place, or when the plan is superseded."""
        try:
            if self._may_have(step):
                self._heal(plan, step, self._own_digest())
                return
            try:
                self._heal(plan, step, "")
            except RestoreError:
                self._heal(plan, step, self._own_digest())
        except RestoreError as error:
            self._runtime.tell(msg.HealFailed(plan.generation, str(error)))
            self._runtime.wait_for(lambda: self._over(plan))

    def _heal(self, plan: Plan, step: int, own: str) -> None:
        """With the digest of what is here, only from donors that have taken theirs and agree in it."""
        lines, same = self._open_lines(plan, step, own)
        started = time.monotonic()  # donors have been waited for until their commits were through
        try:
            if same is not None:
                self._done(plan, step, started, own, same.records)
                return
            if not lines:
                return
            wanted = self._begin(plan, step, lines)
            digest = self._take(lines)
            missing = self._receiver.missing()
            self._taken_bytes += wanted - sum(chunk.length for chunk in missing)
            if digest and not missing:
                healed = self._receiver.finish(digest)
                self._runtime.training.restored()
                self._done(plan, step, started, healed, lines[0].offer.records)
        finally:
            if self._taken_bytes:
                self._taken_s += time.monotonic() - started
            for line in lines:
                line.close()

    def _may_have(self, step: int) -> bool:
        """Whether the state that is here may be that after `step`: not if it is a new script's."""
        return step < 0 or self._runtime.training.restorations > 0

    def _own_digest(self) -> str:
        """The digest of the state that is here; it stays until something is taken or restored."""
        if not self._own or self._own_at != self._runtime.training.restorations:
            self._own_at = self._runtime.training.restorations
            self._own = self._runtime.training.digest_now()
        return self._own

    def _open_lines(self, plan: Plan, step: int, digest: str) -> tuple[list[_Line], Same | None]:
        donors = [donor for donor in plan.donors if donor.worker != self._runtime.member.worker]
        lines: list[_Line] = []
        same: list[Same] = []

        def ask(donor: Address) -> None:
            answer, sock = self._ask(donor, plan, Ask(step, digest))
            if isinstance(answer, Offer) and sock is not None:
                memory = answer.memory
                remote = pull.open_remote(memory.pid, memory.token_at, memory.token)
                lines.append(_Line(donor.worker, sock, answer, remote))
            elif sock is not None:
                same.extend([answer] if isinstance(answer, Same) else [])
                sock.close()

        _at_once([functools.partial(ask, donor) for donor in donors])
        sessions = [line.offer.session for line in lines if not same]
        usual = max(sessions, key=sessions.count, default=None)
        agreed = [line for line in lines if line.offer.session == usual]
        for line in lines:
            if line not in agreed:
                line.close()
        return agreed, same[0] if same else None

    def _ask(
        self, donor: Address, plan: Plan, question: Ask | HowLarge
    ) -> tuple[Offer | Same | No | Size | None, socket.socket | None]:
        hello = Hello(HEAL, plan.generation, self._runtime.member.worker, donor.worker)
        try:
            sock = connect(donor, self._secret, hello, CONNECT_S)
        except (OSError, WireError):
            return None, None
        try:
            sock.settimeout(IDLE_S)
            _send(sock, question)
            return _FROM_DONOR.decode(_receive(sock)), sock
        except _BROKEN:
            sock.close()
            return None, None

    def _begin(self, plan: Plan, step: int, lines: Sequence[_Line]) -> int:
        offer = lines[0].offer
        # P14: with two other holders the state may be written where it stays before its digest is checked.
        self._receiver.begin(offer.session, offer.description, staged=len(lines) < 2)
        self._own = ""
        nbytes = sum(chunk.length for chunk in self._receiver.missing())
        donors = tuple(line.worker for line in lines)
        self._runtime.tell(msg.HealStarted(plan.generation, step, nbytes, donors))
        return nbytes

    def _take(self, lines: Sequence[_Line]) -> str:
        """All lines at once, each taking the next chunk that nobody has asked for; returns the digest."""
        todo: deque[Chunk] = deque(self._receiver.missing())
        digests: list[str] = []
        calls = [functools.partial(self._take_from, line, todo) for line in lines]
        _at_once([lambda: digests.append(self._digest_of(lines)), *calls])
        return digests[0]

    def _digest_of(self, lines: Sequence[_Line]) -> str:
        """The digest of the state that is offered; empty if no donor is left to say it."""
        near_first = sorted(lines, key=lambda line: line.remote is None)  # their sockets are idle
        for line in near_first:
            if line.offer.session.digest:
                return line.offer.session.digest
            with contextlib.suppress(*_BROKEN), line.talk:
                _send(line.sock, Check())
                answer = _FROM_DONOR.decode(_receive(line.sock))
                if isinstance(answer, Checked):
                    return answer.digest
        return ""

    def _take_from(self, line: _Line, todo: deque[Chunk]) -> None:
        if line.remote is not None and not self._read_from(line, todo):
            return
        with line.talk:
            self._ask_for(line, todo)

    def _ask_for(self, line: _Line, todo: deque[Chunk]) -> None:
        """Take chunks through the socket."""
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

    def _read_from(self, line: _Line, todo: deque[Chunk]) -> bool:
        """Read chunks from the donor's memory; true if what is left has to come through the socket."""
        session = line.offer.session
        while todo:
            try:
                chunk = todo.popleft()
            except IndexError:
                return False
            try:
                view = self._receiver.buffer(session, chunk.index)
                if view is not None:
                    line.read(chunk, view)
                    self._receiver.landed(session, chunk.index)
            except pull.UnreadableError:
                todo.appendleft(chunk)
                return True
            except pull.GoneError:
                todo.appendleft(chunk)
                return False
        return False

    def _done(self, plan: Plan, step: int, started: float, digest: str, records: Sequence[Record]) -> None:
        runtime = self._runtime
        with runtime.lock:
            if self._over(plan):
                return
            for record in records:
                runtime.member.records.setdefault(record.step, record)
            runtime.perform(runtime.member.healed(digest))
        seconds = self._taken_s + time.monotonic() - started
        runtime.tell(msg.Healed(plan.generation, step, self._taken_bytes, seconds, "replica"))
        self._taken_bytes, self._taken_s = 0, 0.0

    def _over(self, plan: Plan) -> bool:
        current = self._runtime.member.plan
        return current is None or current.generation != plan.generation


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Carry the calls out side by side, each on a thread of its own; return when all have ended."""
    threads = [
        threading.Thread(target=defect.fatal(call), name="perdure-heal", daemon=True) for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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

"""The worker's runtime: one `Member`, one lock, and the threads that meet there.

    main thread       the user's script; asks `next_micro_batch`, tells `finish_micro_batch`, commits
    link thread       the coordinator's messages (`link`)
    transport thread  the peers' payloads and messages (`mesh`), one per generation
    groups thread     closes torn transports (`groups`)

Every decision is the `Member`'s; `perform` carries its actions out. The main thread waits on one condition,
which every action that could concern it notifies.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.core import member as core
from perdure.core.member import Do, Member
from perdure.core.step import with_digest
from perdure.schema import messages as msg
from perdure.schema.errors import ProtocolError
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Entry, Header, Ledger, PeerMessage, Plan, Record
from perdure.schema.progress import Phase
from perdure.worker import defect
from perdure.worker.float_mode import flushes_denormals
from perdure.worker.groups import Groups
from perdure.worker.progress import ProgressPage
from perdure.worker.reduce import Reducer, tell_all
from perdure.worker.training import Training
from perdure.worker.transport import Bulk, Later

LAST_WORDS_S = 0.2
"""A worker that ends by an error waits so long for the lock; what it has to say is no more than useful."""

_PEER = msgspec.msgpack.Decoder(PeerMessage)


@dataclass
class Inbox:
    """What the coordinator asked of the main thread."""

    restore: msg.Restore | None = None
    checkpoint: msg.Checkpoint | None = None
    release: msg.Release | None = None
    deals: list[msg.EvaluationDeal] = field(default_factory=list)
    answers: list[msg.EvaluationAll] = field(default_factory=list)
    saves: list[msg.SaveAnswer] = field(default_factory=list)


class Runtime:
    """Binds the step transaction to tensors, sockets and threads."""

    def __init__(
        self,
        member: Member,
        training: Training,
        send: Callable[[msg.WorkerMessage], None],
        page: ProgressPage,
    ) -> None:
        self.member = member
        self.training = training
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.inbox = Inbox()
        self.groups: Groups | None = None
        self.page = page
        self._send = send
        self.log_samples = False
        self.seals = 0
        self._broken: dict[Generation, tuple[WorkerId, str]] = {}
        self.summed: tuple[tuple[int, WorkerId, tuple[int, ...]], ...] = ()
        self._samples = 0
        self.reducer = Reducer(
            member, self.lock, self.perform, training.buckets, training.leaves, training.buffers
        )

    # ── actions ─────────────────────────────────────────────────────────────────────────────────────

    def perform(self, actions: Sequence[core.Action]) -> None:
        """Carry out what the member decided. Called with the lock held; nothing here blocks."""
        for action in actions:
            match action:
                case core.Tell(message):
                    self._send(message)
                    if isinstance(message, msg.Adopted):
                        self._tell_trouble(message.generation)
                case core.Wake():
                    self.changed.notify_all()
                case core.Broadcast(generation, body):
                    self._broadcast(generation, body)
                case core.StartExchange():
                    self._start_exchange(action)
                case core.FormGroup(generation, members):
                    if self.groups is None or self.groups.form(generation, members):
                        self.perform(self.member.group_formed(generation))
                case core.Interrupt(below):
                    if self.groups is not None:
                        self.groups.interrupt(below)
                    self.changed.notify_all()
                case core.DropGroups(below):
                    if self.groups is not None:
                        self.groups.retire(below)
                case core.Void():
                    self.reducer.void()

    def _broadcast(self, generation: Generation, body: PeerMessage) -> None:
        """Say something to the generation's members, after what was contributed so far."""
        transport = self.groups.get(generation) if self.groups is not None else None
        plan = self.member.plan

        def say() -> None:
            if transport is not None and plan is not None:
                tell_all(transport, self.member.worker, plan.ranks, body)
            if isinstance(body, Header):
                self.reducer.ledger_grew(generation)

        if transport is None:
            say()
        else:
            # From its own thread, so that the main thread gives up the interpreter once, not once a peer.
            transport.submit(say)

    def _start_exchange(self, start: core.StartExchange) -> None:
        self.training.leaves.keep(self.member.work.held)

        def begin() -> None:
            with self.lock:
                # Sealed in the meantime, its group is gone already, and its round need not begin.
                if self.member.round.exchange is start.exchange and not self.member.superseded:
                    transport = self.groups.get(start.plan.generation) if self.groups is not None else None
                    self.reducer.begin(start, transport)

        if self.groups is None:
            begin()
        else:
            self.groups.when_clear(begin)

    # ── the coordinator's messages (link thread) ────────────────────────────────────────────────────

    def on_message(self, message: msg.CoordinatorMessage) -> None:
        """Take a message of the coordinator."""
        with self.lock:
            match message:
                case msg.Seal():
                    self.perform(self.member.seal(message))
                    self.seals += 1
                case msg.Open(plan):
                    self.perform(self.member.open(plan))
                case msg.Prepare(plan):
                    self.perform(self.member.prepare(plan))
                case msg.Acknowledged(step):
                    self.member.acknowledged(step)
                case msg.Restore():
                    self.inbox.restore = message
                case msg.Checkpoint():
                    self.inbox.checkpoint = message
                case msg.Release():
                    self.inbox.release = message
                case msg.EvaluationDeal():
                    self.inbox.deals.append(message)
                case msg.EvaluationAll():
                    self.inbox.answers.append(message)
                case msg.SaveAnswer():
                    self.inbox.saves.append(message)
                case msg.Welcome():
                    raise ProtocolError("a second Welcome")
            self.changed.notify_all()

    # ── the main thread ─────────────────────────────────────────────────────────────────────────────

    def next_micro_batch(self) -> int | None:
        """The next micro-batch to compute; None when the commit was entered and `.grad` is global.

        Raises SystemExit if this worker was told to go meanwhile.
        """
        step = self.member.committed + 1
        while True:
            with self.lock:
                now = self.member.next()
                if now.do is Do.COMPUTE:
                    self._start(step, now.micro_batch)
                    return now.micro_batch
                if now.do is Do.COMMIT and self.member.enter_commit():
                    self._enter_commit(step)
                    return None
                if self.inbox.release is not None:
                    raise SystemExit(self.inbox.release.exit_code)
                if now.do in (Do.WAIT, Do.END):  # at the end: a donor until released (P16)
                    self.page.write(Phase.REDUCE, step, -1, self._samples)
                    self.changed.wait()
                    continue
            if now.do is Do.HEADER:
                self._say_header()

    def _start(self, step: int, micro_batch: int) -> None:
        self.perform(self.member.start(micro_batch))
        shape, work = self.member.shape, self.member.work
        first = shape.run(shape.block(micro_batch)).first
        extends = any(run.first == first and run.stop == micro_batch for run in work.held)
        start = first if extends or micro_batch == first else micro_batch
        self.training.begin(start, in_order=extends and shape.block(micro_batch) == 0)
        self.page.write(Phase.DATA, step, micro_batch, self._samples)

    def compute_begins(self, micro_batch: int, samples: int) -> None:
        """The batch is loaded; the forward pass starts."""
        self._samples += samples
        self.page.write(Phase.COMPUTE, self.member.committed + 1, micro_batch, self._samples)

    def last_in_queue(self) -> bool:
        """Whether the micro-batch in hand is this worker's last of the step."""
        return not self.member.work.queue

    def finish_micro_batch(self, entry: Entry, void: bool) -> None:
        """The micro-batch in hand is done: its leaf may be final now."""
        micro_batch = entry.micro_batch
        with self.lock:
            if void:
                self.perform(self.member.voided(micro_batch))
                self.training.leaves.keep(self.member.work.held)
                return
            self.training.leaves.capture()
            self.perform(self.member.computed(entry))
            shape = self.member.shape
            run = next((r for r in self.member.work.held if r.first <= micro_batch < r.stop), None)
            if run is None:
                return
            entries = self._own_entries() if self.last_in_queue() else ()
            block_0 = run.first == 0 and run.stop >= min(
                shape.run(0).stop, shape.present(self.member.committed + 1)
            )
            if block_0 and self.training.buffers.nbytes:
                self.training.buffers.block_0_ended()
        if block_0:
            self.reducer.buffers_ready()
        self.reducer.leaf_final(micro_batch, entries)

    def unfit(self) -> None:
        """What went early was not final (E3): nobody may commit this round."""
        with self.lock:
            self.member.unfit = True
            self.reducer.spoil()

    def _own_entries(self) -> tuple[Entry, ...]:
        return tuple(entry for _, entry in sorted(self.member.work.entries.items()))

    def entries_early(self, entry: Entry) -> None:
        """Say this worker's losses and weights before its last backward of the step."""
        self.reducer.entries_early((*self._own_entries(), entry))

    def _say_header(self) -> None:
        """After the last backward: the digest of the state that the step was computed from (P8)."""
        self.training.buffers.put_back()
        digest = self.training.digest(self.member.committed)
        with self.lock:
            if self.member.next().do is Do.HEADER:
                self.perform(self.member.header(digest))

    def _enter_commit(self, step: int) -> None:
        """P1: results are swapped into `.grad` in the same critical section that enters commit."""
        self.training.swap_in(self.reducer.results.as_grads())
        if self.log_samples:
            ledger = self.member.work.ledger
            self.summed = tuple((m, ledger[m].worker, ledger[m].ids) for m in sorted(ledger))
        self.training.note_losses(self.member.work.ledger, self.member.shape.present(step))
        self.page.write(Phase.COMMIT, step, -1, self._samples)

    def commit_ended(self, record: Record) -> None:
        """The user's commit code is through; the next step (or the end) begins."""
        self.training.committed()
        with self.lock:
            self.reducer.committed()
            self.reducer.flush_denormals = flushes_denormals()
            self.perform(self.member.commit_ended(record))
            generation = self.member.plan.generation if self.member.plan else Generation(0, 0)
            self.reducer.forget_older(generation, self.member.committed + 1)
            self.changed.notify_all()  # a donor's desk may wait for it

    def unconfirmed(self) -> tuple[Record, ...]:
        """The lines of committed steps that are not known to be written, oldest first. For a worker's end.

        Never raises, and waits for no thread for long.
        """
        if not self.lock.acquire(timeout=LAST_WORDS_S):
            return ()
        try:
            records, last = dict(self.member.records), self.member.committed
            if last in records and not (self.member.committing or self.member.healing):
                with contextlib.suppress(Exception):  # the state itself may be what the error is about
                    if threading.current_thread() is threading.main_thread():
                        self.training.buffers.put_back()  # the forward that failed may have changed them
                    records[last] = with_digest(records[last], self.training.digest(last))
            return tuple(records[step] for step in sorted(records))
        finally:
            self.lock.release()

    def wait_for(self, what: Callable[[], bool], phase: Phase = Phase.WAIT) -> None:
        """Wait until `what` (asked under the lock) is true."""
        with self.lock:
            if not what():
                self.page.write(phase, self.member.committed + 1, -1, self._samples)
            while not what():
                self.changed.wait()

    def wait_for_answer(self, what: Callable[[], bool], seals: int) -> None:
        """Wait in a commit until `what` is true, or until a seal came that was not among the first `seals`.

        A seal may mean that the coordinator, or the way to it, is a new one: what was asked is lost.
        """
        self.wait_for(lambda: what() or self.seals != seals, Phase.COMMIT)

    def tell(self, message: msg.WorkerMessage) -> None:
        """Send a message to the coordinator."""
        self._send(message)

    # ── the peers (transport threads) ───────────────────────────────────────────────────────────────

    def ear(self, generation: Generation) -> Ear:
        """What a generation's transport calls."""
        return Ear(self, generation)

    def heard(self, generation: Generation, body: PeerMessage) -> None:
        """A peer's message, on the thread of that generation's transport."""
        with self.lock:
            self.perform(self.member.heard(body))
        if isinstance(body, Header | Ledger):
            self.reducer.ledger_grew(generation)

    def group_formed(self, generation: Generation) -> None:
        """A transport is connected to all its members."""
        with self.lock:
            self.perform(self.member.group_formed(generation))

    def peer_lost(self, generation: Generation, peer: WorkerId, reason: str) -> None:
        """A connection failed: the coordinator decides what that means."""
        with self.lock:
            if self.member.sealed <= generation:
                self._broken[generation] = (peer, reason)
                self._tell_trouble(generation)

    def _tell_trouble(self, generation: Generation) -> None:
        """Say that a group is broken: now if it is in use or may be soon, else when it is adopted."""
        if generation in self._broken:
            self._send(msg.Trouble(generation, *self._broken[generation]))
            self._broken = {g: broken for g, broken in self._broken.items() if g > generation}

    @property
    def plan(self) -> Plan | None:
        """The plan that this worker works under."""
        return self.member.plan


class Ear:
    """The receiving side of one generation's transport (`transport.Handlers`)."""

    def __init__(self, runtime: Runtime, generation: Generation) -> None:
        self._runtime = runtime
        self._generation = generation

    def formed(self) -> None:
        """The group is complete."""
        self._runtime.group_formed(self._generation)

    def buffer(
        self, peer: WorkerId, header: Bulk, nbytes: int, deferrable: bool
    ) -> memoryview | Later | None:
        """Where to put a payload."""
        return self._runtime.reducer.buffer(self._generation, peer, header, nbytes, deferrable)

    def bulk(self, peer: WorkerId, header: Bulk, view: memoryview) -> None:
        """A payload is complete."""
        self._runtime.reducer.arrived(self._generation, peer, header, view)

    def control(self, peer: WorkerId, body: bytes) -> None:
        """A small message."""
        self._runtime.heard(self._generation, _PEER.decode(body))

    def lost(self, peer: WorkerId, reason: str) -> None:
        """A peer's connection failed."""
        self._runtime.peer_lost(self._generation, peer, reason)

    def broken(self, error: Exception) -> None:
        """A defect: this worker cannot be trusted any more; it is replaced."""
        defect.end(error)


def now() -> float:
    """Unix seconds, for records."""
    return time.time()

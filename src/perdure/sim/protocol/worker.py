"""A simulated worker: the runtime around the production `Member`, with its three threads.

The main thread is a generator: at each `yield` the other threads have their turn (what a number of seconds
is yielded for takes that long, None waits for a wake). The control thread and the data plane are events. A
call into the member and the actions that it returns are one critical section, as in the runtime, but the
process may be killed between any two actions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.core import member as core
from perdure.core.member import Do
from perdure.schema import messages as msg
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Header, Hold, Ledger, Plan, Record, Switched
from perdure.sim.protocol import symbols
from perdure.sim.protocol.healing import State
from perdure.sim.protocol.transports import Transports
from perdure.sim.protocol.world import DiedError

if TYPE_CHECKING:
    from perdure.sim.protocol.agents import SimAgent
    from perdure.sim.protocol.simulation import Simulation

Thread = Generator[float | None]

CLEANING_S = 0.3
"""What an interpreter does between the exception and its end."""


class SimWorker:
    """One training process."""

    def __init__(self, sim: Simulation, worker: WorkerId, agent: SimAgent) -> None:
        self.sim = sim
        self.id = worker
        self.agent = agent
        self.alive = True
        self.member = sim.rig.member(worker, sim.shape)
        self.state = State([sim.initial(worker)] * symbols.CHUNKS)
        self.reducing = sim.rig.reducing(self)
        self.healing = sim.rig.healing(self)
        self.leaving = False
        self.excluded = False
        self._fails = False
        self._failed = False
        self.corrupt = False
        self.healed_late = False
        self.unfit: int | None = None
        self.slow_s = 0.0
        self._restore: msg.Restore | None = None
        self._checkpoint: msg.Checkpoint | None = None
        self._welcomed = False
        self._released = False
        self._deals: list[int] = []
        self._answers: dict[tuple[int, int], msg.EvaluationAll] = {}
        self._groups: dict[Generation, tuple[set[WorkerId], set[WorkerId]]] = {}
        self._transports = Transports(self)
        self._hung_up: set[tuple[Generation, WorkerId]] = set()
        self._finished_at: int | None = None
        self._main = self._run()
        self._waits = False
        sim.world.after(0.0, self.guarded(self._resume))

    # ── being a process ─────────────────────────────────────────────────────────────────────────────

    def hook(self, kind: str) -> None:
        """A point at which a fault may strike. Raises DiedError if this process is killed here."""
        self.sim.faults.reached(kind, self)
        if not self.alive:
            raise DiedError

    def die(self) -> None:
        """End at once, as by SIGKILL."""
        if self.alive:
            self.vanish()
            self.agent.exited(self.id, None)

    def vanish(self) -> None:
        """Be no more; nobody tells of it."""
        self.alive = False
        self.sim.note(f"w{self.id}", "dies")
        self.sim.fabric.die(self.id)

    def exit(self, code: int = 0) -> None:
        """The script is through, or has failed."""
        self.alive = False
        self.sim.note(f"w{self.id}", f"exits with {code}" if code else "exits")
        self.sim.fabric.die(self.id)
        self.agent.exited(self.id, code)

    def raises(self) -> bool:
        """Have the script raise as soon as its thread is at work again."""
        if self._fails:
            return False
        self._fails = True
        self.wake()
        return True

    def _fail(self) -> None:
        """Tell of the exception at once; until the process ends the other threads go on."""
        self._failed = True
        self.excluded = True
        where = f"train.py:{self.sim.next_number()}"  # never the same one: that would be a crash loop
        records = tuple(self.member.records.values())
        self.tell(msg.Crashed("ValueError", where, f"ValueError at {where}", 1, records=records))
        self.sim.world.after(self.sim.world.chance.delay(CLEANING_S), self.guarded(partial(self.exit, 1)))

    def guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        """Something that this process does later, if it still lives."""
        return lambda: call() if self.alive else None

    def tell(self, message: msg.WorkerMessage) -> None:
        """Send a message to the coordinator."""
        self.sim.note(f"w{self.id}", "tells", message)
        self.agent.worker_said(self.id, message)

    def wake(self) -> None:
        """Let the main thread look again, if it waits."""
        if self._waits:
            self._waits = False
            self.sim.world.after(
                self.sim.world.chance.delay(self.sim.pace.think_s), self.guarded(self._resume)
            )

    def _resume(self) -> None:
        if self._fails and not self._failed:
            self._fail()
        if self._failed:
            return
        for pause_s in self._main:
            if pause_s is None:
                self._waits = True
                return
            if pause_s > 0 or self.slow_s > 0:
                slow_s, self.slow_s = self.slow_s, 0.0
                self.sim.world.after(pause_s + slow_s, self.guarded(self._resume))
                return

    def perform(self, actions: Sequence[core.Action]) -> None:
        """Carry out what the member decided."""
        for action in actions:
            self.hook("action")
            match action:
                case core.Tell(message):
                    if isinstance(message, msg.Report):
                        self.healed_late = False
                    self.tell(message)
                case core.Wake():
                    self.wake()
                case core.FormGroup(generation, members):
                    self._form(generation, [m.worker for m in members if m.worker != self.id])
                case core.Interrupt(below):
                    self.hook("seal")
                    self._transports.interrupt(below)
                    self.sim.fabric.close(self.id, below)
                case core.DropGroups(below):
                    self.sim.fabric.close(self.id, below)
                case core.StartExchange(plan):
                    self._transports.when_clear(partial(self._begin, action))
                    self._tell_old_trouble(plan.generation)
                    self.hook("begin")
                case core.Broadcast(generation, body):
                    self._broadcast(generation, body)
                case core.Void():
                    self.sim.note(f"w{self.id}", "voids its leaves")
                    self.unfit = None
                    self.reducing.clear()
                    self.sim.judge.voided(self.id)

    def _begin(self, start: core.StartExchange) -> None:
        """The memory is free: begin the round, unless that is not the one to begin any more."""
        if self.member.round.exchange is start.exchange and not self.member.superseded:
            self.sim.note(f"w{self.id}", f"begins step {start.step} in {start.plan.generation}")
            self.reducing.begin(start)

    def _form(self, generation: Generation, peers: list[WorkerId]) -> None:
        self._groups[generation] = (set(peers), set())
        self.sim.fabric.form(self.id, generation, peers)
        if not peers:
            self.perform(self.member.group_formed(generation))
        self.hook("form")

    def _broadcast(self, generation: Generation, body: Header | Hold | Switched | Ledger) -> None:
        plan = self.member.plan
        assert plan is not None
        self.sim.note(f"w{self.id}", "says", body)
        for peer in plan.ranks:
            if peer != self.id:
                self.sim.fabric.send(generation, self.id, peer, body)
                self.hook(type(body).__name__.lower())

    # ── connections and peers ───────────────────────────────────────────────────────────────────────

    def connected(self, generation: Generation, peer: WorkerId) -> None:
        """A connection of a generation is up."""
        wanted, have = self._groups.get(generation, (set(), set()))
        have.add(peer)
        if have == wanted and generation >= self._transports.torn_below:
            self.perform(self.member.group_formed(generation))

    def hung_up(self, generation: Generation, peer: WorkerId) -> None:
        """A connection of a generation ended."""
        self._hung_up.add((generation, peer))
        self._trouble(generation, peer)

    def _trouble(self, generation: Generation, peer: WorkerId) -> None:
        plan = self.member.plan
        if plan is not None and plan.generation == generation and self.member.sealed <= generation:
            self.sim.judge.trouble(self, peer)
            self.tell(msg.Trouble(generation, peer, "closed"))

    def _tell_old_trouble(self, generation: Generation) -> None:
        """A connection that ended before its generation was adopted."""
        for hung, peer in sorted(self._hung_up):
            if hung == generation:
                self._trouble(generation, peer)

    def arrived(self, generation: Generation, peer: WorkerId, message: Any) -> None:
        """The data plane: a peer's message, or a part of a sum."""

        def take() -> None:
            if isinstance(message, Header | Hold | Switched | Ledger):
                self.perform(self.member.heard(message))
            else:
                self.reducing.arrived(generation, peer, message)

        self._transports.arrived(generation, take)

    # ── control thread ──────────────────────────────────────────────────────────────────────────────

    def control(self, message: msg.CoordinatorMessage) -> None:
        """A message of the coordinator."""
        self.hook(f"control {type(message).__name__}")
        match message:
            case msg.Seal():
                self.perform(self.member.seal(message))
                self.wake()
            case msg.Open(plan):
                self.perform(self.member.open(plan))
            case msg.Prepare(plan):
                self.perform(self.member.prepare(plan))
                self.hook("prepare")
            case msg.Welcome():
                self._welcomed = True
                self.wake()
            case msg.Acknowledged(step):
                self.perform(self.member.acknowledged(step))
            case msg.Restore():
                self._restore = message
                self.wake()
            case msg.Checkpoint():
                self._checkpoint = message
                self.wake()
            case msg.Release():
                self._released = True
                self.wake()
            case msg.EvaluationDeal(step, _, items):
                self._deals += [item for item in items if step == self.member.committed + 1]
                self.wake()
            case msg.EvaluationAll(step, index):
                self._answers[step, index] = message
                self.wake()

    def leave(self) -> None:
        """SIGTERM: hand over at a boundary."""
        self.leaving = True
        self.tell(msg.Leaving())

    # ── main thread ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> Thread:
        pace, chance = self.sim.pace, self.sim.world.chance
        yield chance.delay(pace.start_s)
        self.tell(msg.Joined())
        self.hook("joined")
        while not self._welcomed:
            yield None
        self.tell(msg.Ready("host", 1, self.sim.shape, self.member.position()))
        while True:
            if self._released:
                self.hook("released")
                self.exit()
                return
            if self._restore is not None:
                self._do_restore(self._restore)
            if self._checkpoint is not None:
                yield from self._do_checkpoint(self._checkpoint)
            now = self.member.next()
            if now.do is Do.COMPUTE:
                yield from self._compute(now.micro_batch)
                continue
            yield chance.delay(pace.think_s)
            match now.do:
                case Do.HEADER:
                    digest = self.digest()
                    yield chance.delay(pace.think_s)
                    if self.member.next().do is Do.HEADER:
                        self.perform(self.member.header(digest))
                case Do.COMMIT:
                    yield from self._commit()
                case Do.HEAL:
                    assert self.member.plan is not None
                    yield from self._heal(self.member.plan)
                case Do.END:
                    yield from self._end()
                case Do.WAIT:
                    if self.member.next().do is Do.WAIT and not self._asked:
                        yield None

    @property
    def _asked(self) -> bool:
        order = self._checkpoint
        due = order is not None and self.member.committed >= order.step and not self.member.healing
        return self._released or self._restore is not None or due

    def digest(self) -> str:
        """The digest of the state that the step was computed from (P8)."""
        return self.state.digest

    def _compute(self, micro_batch: int) -> Thread:
        step = self.member.committed + 1
        self.perform(self.member.start(micro_batch))
        self.sim.judge.started(self, step, micro_batch)
        self.sim.note(f"w{self.id}", f"computes {step}.{micro_batch}")
        self.hook("start")
        if not self.member.work.queue and self.sim.world.chance.flip(0.5):
            self._say_losses_early(step, micro_batch)
        state = self.state.digest
        yield self.sim.world.chance.delay(self.sim.pace.micro_batch_s)
        buckets = range(len(self.sim.shape.buckets))
        values = tuple(symbols.gradient(step, micro_batch, bucket, state) for bucket in buckets)
        self.hook("computed")
        if self.unfit == micro_batch:
            values = (symbols.UNFIT,) * len(values)
            self.member.unfit = True
        self.sim.judge.computed(self, step, micro_batch)
        self.perform(self.member.computed(symbols.entry(step, micro_batch)))
        if any(run.first <= micro_batch < run.stop for run in self.member.work.held):
            self.reducing.accumulate(micro_batch, values)
            self.reducing.offer()

    def _say_losses_early(self, step: int, micro_batch: int) -> None:
        """Before the last backward all losses of this member are known: shards can be divided early."""
        plan, work = self.member.plan, self.member.work
        assert plan is not None
        entries = (*work.entries.values(), symbols.entry(step, micro_batch))
        work.ledger.update((entry.micro_batch, entry) for entry in entries)
        self._broadcast(plan.generation, Ledger(plan.generation, step, self.id, entries))

    def _commit(self) -> Thread:
        if not self.member.enter_commit():
            return
        chance, pace = self.sim.world.chance, self.sim.pace
        step = self.member.committed + 1
        sums = self.reducing.swap()
        self.sim.judge.entered(self, step, sums)
        self.sim.note(f"w{self.id}", f"commits step {step}")
        self.hook("enter")
        after = symbols.advance(self.state.digest, step, sums)
        for index in range(symbols.CHUNKS):
            yield chance.delay(pace.commit_s / symbols.CHUNKS)
            self.hook("commit")
            self.state.chunks[index] = after
        if self.sim.schedule.evaluate and step % 2:
            yield from self._evaluate(step)
        plan = self.member.plan
        assert plan is not None
        record = Record(step, self._loss(step), "", self.sim.world.now, len(plan.ranks))
        self.reducing.clear()
        self.unfit = None
        self.sim.judge.committed(self, step, self.state.digest)
        self.sim.note(f"w{self.id}", f"has committed step {step}")
        self.perform(self.member.commit_ended(record))
        self.hook("committed")

    def _loss(self, step: int) -> float:
        ledger = self.member.work.ledger
        entries = [ledger[m] for m in range(self.sim.shape.present(step))]
        return sum(e.weighted_loss for e in entries) / sum(e.weight for e in entries)

    def _evaluate(self, step: int) -> Thread:
        """`job.evaluate` inside the commit: two micro-batches, dealt out among those who ask."""
        self._deals.clear()
        asked: Generation | None = None
        while (step, 0) not in self._answers:
            if asked != self.member.sealed:  # what was dealt or answered may have been lost on the way
                asked = self.member.sealed
                self._deals.clear()
                self.tell(msg.EvaluationAsk(step, 0, 2))
            if self._deals:
                item = self._deals.pop(0)
                yield self.sim.world.chance.delay(self.sim.pace.micro_batch_s)
                self.hook("evaluated")
                self.tell(msg.EvaluationResult(step, 0, item, {"value": symbols.value(step, item)}, 1.0))
            else:
                yield None
        self.sim.judge.evaluated(self, step, self._answers[step, 0])

    def _heal(self, plan: Plan) -> Thread:
        donors = tuple(m.worker for m in plan.donors)
        self.tell(msg.HealStarted(plan.generation, self.member.committed, symbols.CHUNKS, donors))
        yield from self.healing.heal(plan)

    def _end(self) -> Thread:
        if self.member.next().do is not Do.END:
            return
        if self.member.ended and self._finished_at != self.member.committed:
            self._finished_at = self.member.committed
            self.hook("finish")
            self.perform(self.member.finished(self.state.digest))
        if not self._asked:
            yield None

    def _do_restore(self, order: msg.Restore) -> None:
        step, digest = self.sim.durable.checkpoints[order.paths[0]]
        self._restore = None
        self.state = State([digest] * symbols.CHUNKS)
        before, self.member = self.member, self.sim.rig.member(self.id, self.sim.shape, step, digest)
        self.member.sealed, self.member.formed = before.sealed, before.formed  # it may come twice
        self.hook("restored")
        self.tell(msg.Restored(step, digest, order.paths[0]))

    def _do_checkpoint(self, order: msg.Checkpoint) -> Thread:
        """Written at the first boundary at or after the step that was asked for."""
        if self.member.committed < order.step or self.member.healing:
            return
        self._checkpoint = None
        step, digest = self.member.committed, self.state.digest
        yield self.sim.world.chance.delay(self.sim.pace.commit_s)
        self.hook("written")
        path = f"partial-{step}-w{self.id}-{self.sim.next_number()}"
        self.sim.durable.partial[path] = (step, digest)
        self.tell(msg.CheckpointWritten(step, digest, path, symbols.CHUNKS, 0.0))

"""`core.job.Job` on a bench: agents and workers that answer as told, an own clock, everything written down.

Workers here are ideal: what they are asked they answer at once with `serve`. What they do by themselves
(commit, crash, finish) a test says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from perdure.core import job as core
from perdure.core.job import Job, Settings
from perdure.schema import messages as msg
from perdure.schema.ids import NONE, Generation, WorkerId
from perdure.schema.plan import SWITCH, Plan, Position, Record, Shape

SHAPE = Shape(per_step=8, blocks=2, until=10, buckets=(64,), signature="s")
M = TypeVar("M")


class Hand:
    """One worker's answers: what it has, and what it was told. It holds the next step's whole gradient."""

    def __init__(self, worker: WorkerId, node: str) -> None:
        self.id = worker
        self.node = node
        self.generation = NONE
        self.committed = -1
        self.healing = False
        self.finished = False
        self.prepared: Plan | None = None
        self.told: list[msg.CoordinatorMessage] = []

    def position(self) -> Position:
        committed = -1 if self.healing else self.committed
        return Position(
            worker=self.id, generation=self.generation, committed=committed, healing=self.healing,
            whole=not self.healing, done=self.finished, digest=digest(committed),
        )  # fmt: skip


def digest(step: int) -> str:
    return f"digest of {step}" if step >= 0 else ""


class Rig:
    """One job and its surroundings."""

    def __init__(self, **settings: Any) -> None:
        known: dict[str, Any] = {"job": "j", "incarnation": 1, "home_node": "a", "checkpoint_dir": "/c"}
        self.job = Job(Settings(**(known | settings)))
        self.now = 100.0
        self.hands: dict[WorkerId, Hand] = {}
        self.starts: list[core.Start] = []
        self.kills: list[WorkerId] = []
        self.turned_away: list[str] = []
        self.shapes: dict[WorkerId, Shape] = {}
        self.written: list[Record] = []
        self.seen: list[core.Event] = []
        self.said: list[str] = []
        self.publish: list[core.PublishCheckpoint] = []
        self.saves: list[core.PublishSave] = []
        self.discarded: list[str] = []
        self.blocks: list[int] = []
        self.given_up: list[WorkerId] = []
        self.ended: core.End | None = None
        self.restored = -1

    # ── what the job wants ──────────────────────────────────────────────────────────────────────────

    def take(self, actions: Sequence[core.Action]) -> None:
        for action in actions:
            match action:
                case core.Send(worker, message):
                    if worker in self.hands:
                        self.hands[worker].told.append(message)
                case core.Start():
                    self.starts.append(action)
                case core.Kill(worker):
                    self.kills.append(worker)
                case core.TurnAway(node):
                    self.turned_away.append(node)
                case core.Event():
                    self.seen.append(action)
                case core.WriteRecord(record):
                    self.written.append(record)
                case core.PublishCheckpoint():
                    self.publish.append(action)
                case core.PublishSave():
                    self.saves.append(action)
                case core.Discard(partial):
                    self.discarded.append(partial)
                case core.Persist(blocks):
                    self.blocks.append(blocks)
                case core.GiveUp(workers):
                    self.given_up += workers
                case core.Say(text):
                    self.said.append(text)
                case core.End():
                    self.ended = action

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.seen if event.name == name]

    def faults(self) -> list[tuple[WorkerId, str, str]]:
        """(worker, kind, action) of each."""
        found = zip(self.events("fault_detected"), self.events("fault_decided"), strict=True)
        return [(a["worker"], a["kind"], b["action"]) for a, b in found]

    def opened(self) -> list[dict[str, Any]]:
        return self.events("generation_opened")

    # ── what happens ────────────────────────────────────────────────────────────────────────────────

    def hello(
        self, node: str = "a", workers: int = 2, seen: Sequence[WorkerId] = (), key: str = "", asked: int = 0
    ) -> None:
        # An agent repeats what a worker said when it was ready, however far that has come since.
        first = {w: msg.Ready("h", 1, SHAPE, Position(worker=w)) for w in seen if w in self.hands}
        there = tuple(msg.WorkerSeen(w, 1000 + w, True, ready) for w, ready in first.items())
        hello = msg.AgentHello(node, f"host-{node}", workers, 0, ("train.py",), "0", there, key, asked)
        self.take(self.job.agent_joined(hello, self.now))

    def ready(self, hand: Hand, shape: Shape = SHAPE) -> msg.Ready:
        return msg.Ready("h", 1, shape, hand.position())

    def started(self, shape: Shape = SHAPE) -> None:
        """Every worker that was ordered exists and reaches its first step."""
        while self.starts:
            start = self.starts.pop(0)
            self.hands[start.worker] = hand = Hand(start.worker, start.node)
            self.take(self.job.worker_started(hand.id, 1000 + hand.id, self.now))
            self.say(hand.id, msg.Joined())
            self.say(hand.id, self.ready(hand, self.shapes.get(hand.id, shape)))

    def say(self, worker: WorkerId, message: msg.WorkerMessage) -> None:
        self.take(self.job.worker_said(worker, message, self.now))

    def ending(self, worker: WorkerId) -> None:
        """Its lifeline shows that it is about to be dead."""
        self.hands.pop(worker, None)
        self.take(self.job.worker_ending(msg.WorkerEnding(worker, self.now), self.now))

    def exit(
        self, worker: WorkerId, code: int | None = None, signum: int | None = None, tail: str = ""
    ) -> None:
        self.hands.pop(worker, None)
        self.take(self.job.worker_exited(msg.WorkerExited(worker, code, signum, 0.001, 0.0, tail), self.now))

    def kill(self, worker: WorkerId) -> None:
        self.exit(worker, signum=9)

    def crash(
        self,
        worker: WorkerId,
        kind: str = "ValueError",
        line: int = 7,
        user: bool = False,
        records: tuple[Record, ...] = (),
    ) -> None:
        trace = f"Traceback (most recent call last):\n{kind}: it broke\n"
        code = 4 if user else 1
        self.say(worker, msg.Crashed(kind, f"train.py:{line}", trace, code, user, records=records))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.job.tick(self.now))

    def told(self, worker: WorkerId, kind: type[M]) -> list[M]:
        return [message for message in self.hands[worker].told if isinstance(message, kind)]

    def serve(self, *silent: WorkerId) -> None:
        """Everybody who lives, but for the silent, answers what they were told, until nothing is new."""
        answered = True
        while answered:
            answered = False
            for hand in list(self.hands.values()):
                if hand.id not in silent:
                    new, hand.told = [m for m in hand.told if type(m) in _ANSWERS], [
                        m for m in hand.told if type(m) not in _ANSWERS
                    ]  # fmt: skip
                    for message in new:
                        answered = True
                        _ANSWERS[type(message)](self, hand, message)

    def adopt(self, hand: Hand, plan: Plan, base: int) -> None:
        hand.generation = plan.generation
        if hand.id in plan.joiners:
            hand.committed, hand.healing = base, True
        elif hand.id in plan.ranks:
            hand.committed = max(hand.committed, base)
        self.say(hand.id, msg.Adopted(plan.generation, base))
        if hand.healing:
            hand.healing = False
            self.say(hand.id, msg.Healed(plan.generation, base, 10, 0.1, "replica"))

    def switch(self) -> None:
        """The members reach the boundary that they agreed upon."""
        plan = next(hand.prepared for hand in self.hands.values() if hand.prepared is not None)
        base = max(hand.committed for hand in self.hands.values())
        for hand in self.hands.values():
            if hand.prepared is not None:
                hand.prepared = None
                self.adopt(hand, plan, base)
        self.serve()

    @property
    def members(self) -> tuple[WorkerId, ...]:
        return self.job.membership.members

    def commit(self, steps: int = 1) -> None:
        """All members commit; the record comes from the lowest of them in the next step's headers."""
        for _ in range(steps):
            for worker in self.members:
                self.hands[worker].committed += 1
                current = self.job.membership.current
                assert current is not None
                self.say(worker, msg.Computed(current.generation, self.hands[worker].committed, 0))
            step = self.hands[self.members[0]].committed
            self.now += 1.0
            self.say(self.members[0], msg.Published(self.record(step)))

    def record(self, step: int) -> Record:
        return Record(step, 1.0, digest(step), self.now, len(self.members))

    def refuse(self, wrong: Sequence[WorkerId], unfit: tuple[WorkerId, ...] = ()) -> None:
        """All members tell that these had another state."""
        generation = self.hands[self.members[0]].generation
        digests = {w: f"wrong {w}" if w in wrong else "right" for w in self.members}
        for worker in self.members:
            if worker in self.hands:
                self.say(worker, msg.Refusal(generation, self.hands[worker].committed + 1, digests, unfit))

    def finish(self) -> None:
        """Every member is through its loop."""
        for worker in self.members:
            hand = self.hands[worker]
            hand.finished = True
            step = hand.committed
            self.say(worker, msg.Finished(step, digest(step), self.record(step)))

    def write(self, worker: WorkerId, step: int) -> None:
        """A checkpoint that was asked for is written aside, and put in place."""
        self.say(worker, msg.CheckpointWritten(step, digest(step), f"/c/{step}.partial", 10, 0.1))
        while self.publish:
            written = self.publish.pop(0).written
            self.take(self.job.published(written, f"/c/{written.step}", "", self.now))


def restarted(old: Rig, **settings: object) -> Rig:
    """A new coordinator, and the workers that the old one had."""
    new = Rig(**({"incarnation": 2, "last_step": 3, "first_worker": 3, "blocks": 2} | settings))
    new.hands = old.hands
    for hand in new.hands.values():
        hand.told.clear()
    return new


def _seal(rig: Rig, hand: Hand, message: Any) -> None:
    hand.prepared = None
    rig.say(hand.id, msg.Report(message.generation, hand.position()))


def _open(rig: Rig, hand: Hand, message: Any) -> None:
    if message.plan.base != SWITCH and message.plan.generation > hand.generation:
        rig.adopt(hand, message.plan, message.plan.base)


def _prepare(rig: Rig, hand: Hand, message: Any) -> None:
    hand.prepared = message.plan


def _restore(rig: Rig, hand: Hand, message: Any) -> None:
    hand.committed = rig.restored
    path = message.paths[0] if rig.restored >= 0 else ""
    rig.say(hand.id, msg.Restored(rig.restored, digest(rig.restored), path, ()))


_ANSWERS: dict[type, Callable[[Rig, Hand, Any], None]] = {
    msg.Seal: _seal, msg.Open: _open, msg.Prepare: _prepare, msg.Restore: _restore,
}  # fmt: skip


def training(workers: int = 2, steps: int = 1, **settings: Any) -> Rig:
    """A job of one node that has committed a few steps."""
    rig = Rig(**settings)
    rig.hello(workers=workers)
    rig.started()
    rig.serve()
    rig.commit(steps)
    return rig


__all__ = ["SHAPE", "Generation", "Hand", "Rig", "training"]

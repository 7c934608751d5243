"""What goes wrong in a run: drawn from its seed as data, then done at the moment that was drawn.

A moment is a point in the code of some process (the n-th time that any worker reaches it) or a time. After
`Schedule.quiet_s` nothing goes wrong any more, and the job must come to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from perdure.schema.plan import Shape
from perdure.sim.protocol.world import Chance

if TYPE_CHECKING:
    from perdure.sim.protocol.simulation import Simulation
    from perdure.sim.protocol.worker import SimWorker

POINTS: dict[str, int] = {
    "start": 24, "computed": 24, "send": 60, "fold": 24, "header": 16, "ledger": 4, "hold": 16, "enter": 12,
    "commit": 30, "committed": 12, "evaluated": 4, "begin": 16, "action": 120, "seal": 6, "form": 8,
    "prepare": 5, "switched": 4, "heal": 5, "give": 12, "chunk": 12, "healed": 5, "joined": 5, "restored": 1,
    "written": 2, "finish": 4, "released": 3, "coordinator": 150, "control Open": 6, "control Seal": 6,
    "control Release": 3, "control Prepare": 5,
}  # fmt: skip
"""Where a fault may strike, and about how often a run comes by there."""

KINDS = ("crash", "crash", "crash", "crash", "other", "other", "leave", "leave", "stop", "grow", "restart",
         "sever", "partition", "blip", "slow", "unfit", "corrupt", "raise", "raise", "machine",
         "full")  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: `kind`, at the `nth` time that `point` is reached (or at `time_s`)."""

    kind: str
    point: str = ""
    nth: int = 0
    time_s: float = 0.0

    def __str__(self) -> str:
        when = f"the {self.nth}. {self.point}" if self.point else f"{self.time_s:.1f} s"
        return f"{self.kind} at {when}"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things typically take, in seconds."""

    micro_batch_s: float = 1.0
    commit_s: float = 0.2
    think_s: float = 0.01
    wire_s: float = 0.05
    control_s: float = 0.05
    start_s: float = 2.0
    retry_s: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One run: its size, its speeds and its faults."""

    seed: int
    shape: Shape
    nodes: int
    workers: int
    standby: int
    pace: Pace
    faults: tuple[Fault, ...]
    checkpoint_every: int
    seeded: bool
    evaluate: bool
    elastic: bool = False
    quiet_s: float = 60.0
    bound_s: float = 800.0


def draw(
    seed: int, kinds: tuple[str, ...] = KINDS, points: tuple[str, ...] = tuple(POINTS), faults_max: int = 4
) -> Schedule:
    """The run that belongs to a seed, with these kinds of faults at these points."""
    chance = Chance(seed)
    blocks = chance.pick((1, 2, 2, 3, 3, 4))
    per_step = blocks * chance.pick((1, 2, 2, 3))
    buckets = tuple(chance.pick((5, 6, 7)) for _ in range(chance.pick((1, 2, 2, 3))))
    until = chance.pick((2, 3, 3, 4))
    ragged = chance.flip(0.2) and per_step > 1
    shape = Shape(
        per_step=per_step,
        blocks=blocks,
        until=until,
        buckets=buckets,
        first_block_whole=chance.flip(0.1),
        epoch_steps=2 if ragged else 0,
        last_in_epoch=per_step - 1 if ragged else 0,
    )
    nodes = chance.pick((1, 2, 2, 3))
    workers = chance.pick((1, 1, 2))
    speed = (0.02, 0.1, 0.5)
    pace = Pace(
        micro_batch_s=chance.pick((0.2, 1.0)),
        wire_s=chance.pick(speed),
        control_s=chance.pick(speed),
        start_s=chance.pick((0.5, 3.0, 15.0)),
    )
    count = chance.pick((0, 1, 1, 2, 2, 3, faults_max))
    faults = tuple(_fault(chance, kinds, points) for _ in range(count)) if kinds else ()
    return Schedule(
        seed=seed,
        shape=shape,
        nodes=nodes,
        workers=workers,
        standby=int(chance.flip(0.3)),
        pace=pace,
        faults=faults,
        checkpoint_every=chance.pick((0, 1, 2)),
        seeded=chance.flip(0.5),
        evaluate=chance.flip(0.3),
        elastic=chance.flip(0.3),
    )


def _fault(chance: Chance, kinds: tuple[str, ...], points: tuple[str, ...]) -> Fault:
    kind = chance.pick(kinds)
    if chance.flip(0.2):
        return Fault(kind, time_s=chance.between(0.0, 25.0))
    point = "coordinator" if kind == "restart" and chance.flip(0.7) else chance.pick(points)
    return Fault(kind, point, 1 + int(chance.between(0, POINTS[point])))


class Faults:
    """Does what the schedule says."""

    def __init__(self, sim: Simulation, faults: tuple[Fault, ...]) -> None:
        self.sim = sim
        self.fired: list[Fault] = []
        self._counts: Counter[str] = Counter()
        self._at: dict[tuple[str, int], list[Fault]] = {}
        for fault in faults:
            if fault.point:
                self._at.setdefault((fault.point, fault.nth), []).append(fault)
            else:
                sim.world.at(fault.time_s, partial(self._fire, fault, None))

    def reached(self, point: str, worker: SimWorker | None) -> None:
        """Some process came by a point."""
        self._counts[point] += 1
        due = self._at.pop((point, self._counts[point]), None) if self._at else None
        if due is not None and self.sim.world.now < self.sim.schedule.quiet_s:
            for fault in due:
                self._fire(fault, worker)

    @property
    def disturbing(self) -> bool:
        """Whether anything fired that may interrupt training."""
        return any(fault.kind not in ("leave", "grow", "stop", "slow", "full") for fault in self.fired)

    def _fire(self, fault: Fault, here: SimWorker | None) -> None:
        sim = self.sim
        living = [worker for worker in sim.workers.values() if worker.alive]
        if sim.over or not living:
            return
        others = [worker for worker in living if worker is not here]
        victim = here or sim.world.chance.pick(living)
        if fault.kind == "other" and others:
            victim = sim.world.chance.pick(others)
        doing: dict[str, Callable[[], bool]] = {
            "crash": lambda: self._kill(victim),
            "other": lambda: self._kill(victim),
            "leave": lambda: self._leave(victim),
            "slow": lambda: self._slow(victim),
            "stop": sim.stop,
            "grow": sim.grow,
            "restart": sim.restart,
            "sever": lambda: bool(others) and sim.fabric.sever(victim.id, sim.world.chance.pick(others).id),
            "partition": lambda: sim.cut(victim.agent, sim.world.chance.between(2.0, 20.0)),
            "blip": lambda: sim.cut(victim.agent, 0.0),
            "unfit": lambda: self._unfit(victim),
            "corrupt": lambda: self._corrupt(victim),
            "raise": victim.raises,
            "machine": lambda: sim.lose_machine(victim.agent),
            "full": sim.fill_disk,
        }
        sim.note("fault", str(fault), f"w{victim.id}")
        self.fired.append(fault)
        if not doing[fault.kind]():
            self.fired.remove(fault)

    def _kill(self, victim: SimWorker) -> bool:
        victim.die()
        return True

    def _leave(self, victim: SimWorker) -> bool:
        if victim.leaving:
            return False
        victim.leave()
        return True

    def _unfit(self, victim: SimWorker) -> bool:
        """The micro-batch in hand goes wrong, and its worker notices (P7)."""
        work = victim.member.work
        victim.unfit = work.in_hand if work.in_hand is not None else victim.unfit
        return work.in_hand is not None

    def _corrupt(self, victim: SimWorker) -> bool:
        """A worker's state changes silently between two commits; others must be more, to be right (P8)."""
        member = victim.member
        plan = member.plan
        if plan is None or member.committing or member.healing or member.committed < 0:
            return False
        others = [self.sim.workers[w] for w in plan.ranks if w != victim.id]
        have = [o for o in others if o.member.committed >= member.committed and not o.member.healing]
        sound = [o for o in have if o.alive and not o.corrupt]
        if len(sound) < 2 or self.sim.faults.fired_any("corrupt"):
            return False
        victim.corrupt = True
        victim.state.chunks[:] = [f"corrupt {victim.id}"] * len(victim.state.chunks)
        return True

    def fired_any(self, kind: str) -> bool:
        """Whether a fault of this kind has fired before."""
        return any(fault.kind == kind for fault in self.fired[:-1])

    def _slow(self, victim: SimWorker) -> bool:
        victim.slow_s = self.sim.world.chance.between(1.0, 10.0)
        return True

"""One run: a schedule in, an outcome out.

Simulation ── World          clock, chance, the queue of events
           ├─ SimCoordinator ── Job, Membership, Records, Checkpoints, Tasks   (production)
           ├─ SimAgent       relays, starts workers
           ├─ SimWorker      ── Member, Exchange                              (production)
           ├─ Fabric         connections between workers
           ├─ Faults         what goes wrong
           └─ Judge          what must never happen
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from perdure.core.job import Job
from perdure.core.member import Member
from perdure.core.membership import Membership
from perdure.core.records import Records
from perdure.schema.ids import WorkerId
from perdure.sim.protocol.agents import SimAgent
from perdure.sim.protocol.coordinator import Durable, SimCoordinator
from perdure.sim.protocol.fabric import Fabric
from perdure.sim.protocol.faults import Fault, Faults, Schedule
from perdure.sim.protocol.healing import Healing
from perdure.sim.protocol.judge import Judge, WrongError
from perdure.sim.protocol.reducing import Reducing
from perdure.sim.protocol.trace import Trace
from perdure.sim.protocol.worker import SimWorker
from perdure.sim.protocol.world import Chance, Link, World

EVENTS_MAX = 60_000
AWAY_S = 2.0


class Verdict(Enum):
    """How a run ended."""

    PASSED = "passed"
    CRASH = "crash"
    LIVENESS = "liveness"
    CORRECTNESS = "correctness"


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    seed: int
    verdict: Verdict
    detail: str = ""
    events: int = 0
    commits: int = 0
    fired: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rig:
    """The parts of a run: the production classes and the simulated runtime, any of which a mutant exchanges.

    `patches` are functions of modules, by module and name, exchanged while the run lasts.
    """

    member: type[Member] = Member
    membership: type[Membership] = Membership
    records: type[Records] = Records
    job: type[Job] = Job
    worker: type[SimWorker] = SimWorker
    reducing: type[Reducing] = Reducing
    healing: type[Healing] = Healing
    coordinator: type[SimCoordinator] = SimCoordinator
    patches: tuple[tuple[ModuleType, str, Any], ...] = ()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Exchange the functions."""
        before = [(module, name, getattr(module, name)) for module, name, _ in self.patches]
        try:
            for module, name, replacement in self.patches:
                setattr(module, name, replacement)
            yield
        finally:
            for module, name, original in before:
                setattr(module, name, original)


class Simulation:
    """Everything of one run."""

    def __init__(self, schedule: Schedule, rig: Rig, chance: Chance, trace: Trace | None = None) -> None:
        self.schedule = schedule
        self.shape = schedule.shape
        self.pace = schedule.pace
        self.world = World(chance)
        self.trace = trace
        self.fabric = Fabric(self.world, self.pace.wire_s)
        self.workers: dict[WorkerId, SimWorker] = {}
        self.agents: list[SimAgent] = []
        self.durable = Durable()
        self.stopped = False
        self.over = False
        self.judge = Judge(self)
        self.coordinator: SimCoordinator | None = None
        self.rig = rig
        self._number = 0
        self._lines: dict[tuple[WorkerId, WorkerId], Link] = {}
        self.faults = Faults(self, schedule.faults)
        self.coordinator = rig.coordinator(self)
        for number in range(schedule.nodes):
            self._enter(number)

    # ── running ─────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Outcome:
        """Let it run to its end, or to the bound within which it must have ended."""
        schedule = self.schedule
        verdict, detail = Verdict.PASSED, ""
        deadline_s = schedule.quiet_s + schedule.bound_s
        try:
            with self.rig.patched():
                self.world.run(deadline_s, lambda: self.over or self.world.events > EVENTS_MAX)
            if not self.over:
                verdict, detail = Verdict.LIVENESS, self._standstill()
        except WrongError as error:
            verdict, detail = Verdict.CORRECTNESS, str(error)
        except Exception:  # whatever a production class raises is a finding, not our own failure
            verdict, detail = Verdict.CRASH, traceback.format_exc()
        fired = tuple(self.faults.fired)
        return Outcome(schedule.seed, verdict, detail, self.world.events, self.judge.commits, fired)

    def _standstill(self) -> str:
        if self.world.events > EVENTS_MAX:
            return f"more than {EVENTS_MAX} events by {self.world.now:.1f} s"
        states = [
            f"w{w.id}: {w.member.next().do.value} after step {w.member.committed} in "
            f"{w.member.plan.generation if w.member.plan else '-'}"
            for w in self.workers.values()
            if w.alive
        ]
        return f"not over after {self.world.now:.0f} s: {'; '.join(states)}"

    def note(self, who: str, what: str, detail: Any = None) -> None:
        """A line of the trace, if one is kept."""
        if self.trace is not None:
            self.trace.add(self.world.now, who, what, detail)

    # ── what happens ────────────────────────────────────────────────────────────────────────────────

    def initial(self, worker: WorkerId) -> str:
        """The state that the script builds; without a seed each worker builds another."""
        return "initial" if self.schedule.seeded else f"initial {worker}"

    def started(self, worker: SimWorker) -> None:
        """An agent started a worker."""
        self.workers[worker.id] = worker
        self.fabric.enter(worker.id, worker)

    def exclude(self, worker: WorkerId) -> None:
        """The coordinator has given a worker up: what it does may not count any more (G4)."""
        if worker in self.workers:
            self.workers[worker].excluded = True

    def next_number(self) -> int:
        """A number that was not used before, for signals that must not look like a crash loop."""
        self._number += 1
        return self._number

    def line(self, source: WorkerId, target: WorkerId) -> Link:
        """The healing connection from one worker to another."""
        if (source, target) not in self._lines:
            self._lines[source, target] = self.fabric.direct()
        return self._lines[source, target]

    def end(self, exit_code: int, message: str) -> None:
        """The coordinator says that the job is over."""
        self.note("coordinator", f"ends the job with {exit_code}: {message}")
        self.judge.ended(exit_code, message)
        self.over = True

    @property
    def ending(self) -> bool:
        """Whether the coordinator has begun to let the workers go."""
        return self.coordinator is not None and self.coordinator.job.phase in ("released", "over")

    def _enter(self, number: int) -> None:
        agent = SimAgent(self, f"node {number}", self.schedule.workers, self.schedule.standby)
        self.agents.append(agent)
        agent.connect()

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> bool:
        """SIGTERM to the launcher."""
        if self.stopped or self.coordinator is None:
            return False
        self.stopped = True
        self.world.after(0.0, self.coordinator.stop)
        return True

    def grow(self) -> bool:
        """Another node joins. A coordinator that has just started first finds the old ones."""
        known = self.coordinator.agents if self.coordinator is not None else {}
        if len(self.agents) > 3 or len(known) < sum(agent.alive for agent in self.agents):
            return False
        self.world.after(0.0, lambda: self._enter(len(self.agents)))
        return True

    def restart(self) -> bool:
        """The coordinator dies and is started again (P9). Once it lets workers go, the job is over."""
        if self.coordinator is None or self.ending:
            return False
        self.coordinator.die()
        self.coordinator = None
        self.note("coordinator", "dies")
        self.world.after(self.world.chance.delay(AWAY_S), self._again)
        return True

    def _again(self) -> None:
        self.coordinator = self.rig.coordinator(self)
        self.note("coordinator", f"starts as incarnation {self.durable.incarnation}")

    def lose_machine(self, agent: SimAgent) -> bool:
        """A machine is gone for good, not the coordinator's own; in a while there is another one."""
        coordinator = self.coordinator
        if agent is self.agents[0] or not agent.alive or self.ending:
            return False
        for worker in agent.processes.values():
            worker.excluded = True
        agent.die()
        if coordinator is not None:
            connection = agent.connections
            delay = self.world.chance.delay(self.pace.control_s)
            self.world.after(delay, lambda: coordinator.lose(agent, connection))
        self.world.after(self.world.chance.between(0.0, 10.0), lambda: self._enter(len(self.agents)))
        return True

    def fill_disk(self) -> bool:
        """The next checkpoint finds no room."""
        if self.durable.full or not self.schedule.checkpoint_every:
            return False
        self.durable.full = True
        return True

    def cut(self, agent: SimAgent, for_s: float) -> bool:
        """A node is out of the coordinator's reach for a while; its workers live on."""
        coordinator = self.coordinator
        if coordinator is None or self.ending or not agent.alive:
            return False
        agent.cut_until_s = self.world.now + for_s
        agent.disconnect()
        connection = agent.connections
        delay = self.world.chance.delay(self.pace.control_s)
        self.world.after(delay, lambda: coordinator.lose(agent, connection))
        if for_s > 0:
            for worker in agent.processes.values():
                worker.excluded = True
        return True

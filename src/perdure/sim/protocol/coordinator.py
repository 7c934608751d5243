"""The simulated server around the production `Job`: its links, its files, and its death.

What is on disk outlives it: metrics.jsonl, checkpoints, the incarnation. All else is rebuilt from the
agents' hellos (P9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.core import job as core
from perdure.core.job import Settings
from perdure.core.membership import Stale
from perdure.schema import messages as msg
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Position, Record

if TYPE_CHECKING:
    from perdure.sim.protocol.agents import SimAgent
    from perdure.sim.protocol.simulation import Simulation

TICK_S = 1.0


@dataclass
class Durable:
    """What is on disk: lines of metrics, checkpoints by path → (step, digest), the last incarnation."""

    records: list[Record] = field(default_factory=list)
    partial: dict[str, tuple[int, str]] = field(default_factory=dict)
    checkpoints: dict[str, tuple[int, str]] = field(default_factory=dict)
    newest_first: list[str] = field(default_factory=list)
    incarnation: int = 0
    first_worker: WorkerId = 0
    blocks: int = 0
    given_up: tuple[WorkerId, ...] = ()
    full: bool = False


class SimCoordinator:
    """One life of the coordinator."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.alive = True
        self.agents: dict[str, SimAgent] = {}
        self.of: dict[WorkerId, SimAgent] = {}
        self.incarnation = self.next_incarnation()
        durable, elastic = sim.durable, sim.schedule.elastic
        settings = Settings(
            job="job",
            incarnation=self.incarnation,
            home_node="node 0",
            min_nodes=1 if elastic else max(sim.schedule.nodes, sum(agent.alive for agent in sim.agents)),
            cut_off=elastic and self.incarnation > 1,
            checkpoint_every=sim.schedule.checkpoint_every,
            blocks=sim.shape.blocks,
            first_worker=durable.first_worker,
            given_up=durable.given_up,
            last_step=durable.records[-1].step if durable.records else -1,
            digests={record.step: record.digest for record in durable.records},
            checkpoints=tuple(durable.newest_first[:2]),
        )
        membership = sim.rig.membership(self.incarnation)
        records = sim.rig.records(settings.last_step, settings.digests)
        self.job = sim.rig.job(settings, membership, records)
        self._watch()
        sim.world.after(TICK_S, self._tick)

    def next_incarnation(self) -> int:
        """P9: persisted before it is used."""
        self.sim.durable.incarnation += 1
        return self.sim.durable.incarnation

    def _watch(self) -> None:
        """Let the judge see when workers are thrown away, and what came of each report."""
        membership, judge = self.job.membership, self.sim.judge
        report, lost = membership.report, membership.lost

        def watched(worker: WorkerId, generation: Generation, position: Position) -> list[object]:
            actions = report(worker, generation, position)
            for action in actions:
                if isinstance(action, Stale):
                    judge.stale(action)
            return list(actions)

        def excluding(worker: WorkerId, *args: Any, **options: Any) -> list[object]:
            self.sim.exclude(worker)
            return list(lost(worker, *args, **options))

        membership.report = watched  # type: ignore[method-assign, assignment]
        membership.lost = excluding  # type: ignore[method-assign, assignment]

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────

    def hello(self, agent: SimAgent, hello: msg.AgentHello) -> None:
        """An agent connected."""
        if self.alive:
            self.agents[agent.name] = agent
            for seen in hello.seen:
                self.of[seen.worker] = agent
            self._carry(self.job.agent_joined(hello, self.sim.world.now))

    def heard(self, agent: SimAgent, message: msg.AgentMessage | tuple[WorkerId, msg.WorkerMessage]) -> None:
        """An agent's message, or a worker's that it relays."""
        now = self.sim.world.now
        if not self.alive:
            return
        match message:
            case (worker, body):
                self.sim.judge.heard(worker, body)
                self._carry(self.job.worker_said(worker, body, now))
            case msg.WorkerStarted(worker, pid):
                self._carry(self.job.worker_started(worker, pid, now))
            case msg.WorkerEnding():
                self._carry(self.job.worker_ending(message, now))
            case msg.WorkerExited():
                self._carry(self.job.worker_exited(message, now))

    def lose(self, agent: SimAgent, connection: int) -> None:
        """An agent's connection broke; a newer one may be there already."""
        if self.alive and agent.connections == connection:
            self._carry(self.job.agent_lost(agent.name, self.sim.world.now))

    def stop(self) -> None:
        """Somebody wants the job to end."""
        if self.alive:
            self._carry(self.job.asked(15, self.sim.world.now))

    def _tick(self) -> None:
        if self.alive and not self.sim.over:
            self._carry(self.job.tick(self.sim.world.now))
            self.sim.world.after(TICK_S, self._tick)

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────

    def _carry(self, actions: Sequence[core.Action]) -> None:
        for action in actions:
            self.sim.faults.reached("coordinator", None)
            if not self.alive:
                return
            match action:
                case core.Send(worker, message):
                    self.sim.note("coordinator", f"to w{worker}", message)
                    self.of[worker].to_worker(worker, message)
                case core.Start(node, worker):
                    self.of[worker] = self.agents[node]
                    self.sim.durable.first_worker = max(self.sim.durable.first_worker, worker + 1)
                    self.agents[node].order(msg.StartWorker(worker, {}))
                case core.Kill(worker, signum):
                    self.sim.note("coordinator", f"kills w{worker}")
                    self.sim.exclude(worker)
                    self.of[worker].order(msg.StopWorker(worker, signum))
                case core.Event(name, fields):
                    self.sim.note("coordinator", name, fields)
                    self.sim.judge.event(name, fields)
                case core.Say(text):
                    self.sim.note("coordinator", text)
                case core.WriteRecord(record):
                    self.sim.judge.written(record)
                    self.sim.durable.records.append(record)
                case core.GiveUp(workers):
                    self.sim.durable.given_up += workers
                case core.PublishCheckpoint(written):
                    self._publish(written)
                case core.End(exit_code, text):
                    self.sim.end(exit_code, text)

    def _publish(self, written: msg.CheckpointWritten) -> None:
        durable = self.sim.durable
        path, reason = f"step-{written.step}", "no space left" if durable.full else ""
        state, durable.full = durable.partial.pop(written.partial), False
        if reason:
            path = ""
        else:
            durable.checkpoints[path] = state
            durable.newest_first.insert(0, path)
            self.sim.judge.published(written)
        delay = self.sim.world.chance.delay(self.sim.pace.control_s)

        def answer() -> None:
            if self.alive:
                self._carry(self.job.published(written, path, reason, self.sim.world.now))

        self.sim.world.after(delay, answer)

    def die(self) -> None:
        """The coordinator's process ends; agents see their connections break."""
        self.alive = False
        for agent in self.sim.agents:
            if agent.coordinator is self:
                agent.disconnect()

"""A simulated node: its agent starts workers, relays their messages, tells how they end, decides nothing.

What is said while there is no coordinator waits and is sent after the next hello; what was under way when
the connection broke is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.sim.protocol.world import Link

if TYPE_CHECKING:
    from perdure.sim.protocol.coordinator import SimCoordinator
    from perdure.sim.protocol.simulation import Simulation
    from perdure.sim.protocol.worker import SimWorker

EARLY = 0.5
"""The share of ends that show in a worker's lifeline first."""

TEARDOWN_S = 0.1
"""The kernel's work from then until the end."""


class SimAgent:
    """One node."""

    def __init__(self, sim: Simulation, name: str, workers: int, standby: int) -> None:
        self.sim = sim
        self.name = name
        self.workers = workers
        self.standby = standby
        self.processes: dict[WorkerId, SimWorker] = {}
        self._joined: set[WorkerId] = set()
        self._ready: dict[WorkerId, msg.Ready] = {}
        self._up = Link(sim.world, sim.pace.control_s)
        self._down = Link(sim.world, sim.pace.control_s)
        self.coordinator: SimCoordinator | None = None
        self._unsent: list[msg.AgentMessage | tuple[WorkerId, msg.WorkerMessage]] = []
        self.alive = True
        self.cut_until_s = 0.0
        self.connections = 0

    # ── the coordinator ─────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        """Say hello to the coordinator that there is, or try again later."""
        coordinator = self.sim.coordinator
        if not self.alive:
            return
        if coordinator is None or self.sim.world.now < self.cut_until_s:
            self.sim.world.after(self.sim.world.chance.delay(self.sim.pace.retry_s), self.connect)
            return
        self.coordinator = coordinator
        self.connections += 1
        seen = tuple(msg.WorkerSeen(w, 1, w in self._joined, self._ready.get(w)) for w in self.processes)
        hello = msg.AgentHello(self.name, self.name, self.workers, self.standby, ("script",), "0", seen)
        self._up.send(lambda: coordinator.hello(self, hello))
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._say(message)

    def disconnect(self) -> None:
        """The connection broke: what was under way is lost; connect again."""
        self._up.cut()
        self._down.cut()
        self.coordinator = None
        self.sim.world.after(self.sim.world.chance.delay(self.sim.pace.retry_s), self.connect)

    def die(self) -> None:
        """The machine is gone: its workers with it, and what was still to be said."""
        self.alive = False
        for process in self.processes.values():
            process.vanish()
        self.processes.clear()
        self.disconnect()

    def order(self, message: msg.StartWorker | msg.StopWorker) -> None:
        """Called by the coordinator: something to do here."""
        if self.coordinator is not None:
            self._down.send(lambda: self._carry_out(message))

    def to_worker(self, worker: WorkerId, message: msg.CoordinatorMessage) -> None:
        """Called by the coordinator: a message for a worker."""

        def deliver() -> None:
            process = self.processes.get(worker)
            if process is not None:
                process.control(message)

        if self.coordinator is not None:
            self._down.send(deliver)

    def _carry_out(self, message: msg.StartWorker | msg.StopWorker) -> None:
        if isinstance(message, msg.StartWorker):
            process = self.sim.rig.worker(self.sim, message.worker, self)
            self.processes[message.worker] = process
            self.sim.started(process)
            self._say(msg.WorkerStarted(message.worker, 1))
        elif message.worker in self.processes:
            self.processes[message.worker].die()

    # ── the workers ─────────────────────────────────────────────────────────────────────────────────

    def worker_said(self, worker: WorkerId, message: msg.WorkerMessage) -> None:
        """Pass a worker's message on."""
        if isinstance(message, msg.Joined):
            self._joined.add(worker)
        elif isinstance(message, msg.Ready):
            self._ready[worker] = message
        self._say((worker, message))

    def exited(self, worker: WorkerId, exit_code: int | None) -> None:
        """Tell how a worker ended, after all that it said; often that it ends comes well before."""
        del self.processes[worker]
        signum = None if exit_code is not None else 1 + self.sim.next_number()

        def gone() -> None:
            self._say(msg.WorkerExited(worker, exit_code, signum, 0.0, self.sim.world.now))

        if self.sim.world.chance.flip(EARLY):
            self._say(msg.WorkerEnding(worker, self.sim.world.now))
            self.sim.world.after(self.sim.world.chance.delay(TEARDOWN_S), gone)
        else:
            gone()

    def _say(self, message: msg.AgentMessage | tuple[WorkerId, msg.WorkerMessage]) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            self._unsent.append(message)
        else:
            self._up.send(lambda: coordinator.heard(self, message))

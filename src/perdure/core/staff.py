"""The worker processes of a job: which exist, in which slot of which node, in what state. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record


@dataclass
class Node:
    """A machine with an agent: how many workers and standbys it is to hold."""

    name: str
    host: str
    workers: int
    standby: int
    rank: int
    lost_at: float | None = None


@dataclass
class Worker:
    """One process. `slot` is its local rank; slots from `Node.workers` on are standbys at their start."""

    id: WorkerId
    node: str
    slot: int
    pid: int = 0
    joined: bool = False
    ready: bool = False
    leaving: bool = False
    released: bool = False
    stopped: bool = False
    finished: int | None = None
    broke_off: bool = False
    last_record: Record | None = None
    last_digest: str = ""
    crash: msg.Crashed | None = None
    progress: msg.Progress | None = None


@dataclass(frozen=True)
class Vacancy:
    """A place for a worker to be started in."""

    node: str
    slot: int


@dataclass
class Staff:
    """Nodes and workers."""

    first_id: WorkerId = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)

    def hire(self, vacancy: Vacancy) -> Worker:
        """A new worker with an id that was never used."""
        worker = Worker(self.first_id, vacancy.node, vacancy.slot)
        self.first_id += 1
        self.workers[worker.id] = worker
        return worker

    def on(self, node: str) -> list[Worker]:
        """The workers of a node."""
        return [worker for worker in self.workers.values() if worker.node == node]

    @property
    def target(self) -> int:
        """How many members the job is to have with the nodes at hand."""
        return sum(node.workers for node in self.nodes.values() if node.lost_at is None)

    def vacancies(self, standbys: bool) -> Iterator[Vacancy]:
        """Places without a worker that stays; standbys only once the script is known to use perdure."""
        for node in self.nodes.values():
            if node.lost_at is not None:
                continue
            staying = [worker for worker in self.on(node.name) if not (worker.leaving or worker.stopped)]
            wanted = node.workers + (node.standby if standbys else 0)
            taken = {worker.slot for worker in self.on(node.name)}
            free = (slot for slot in range(wanted + len(taken) + 1) if slot not in taken)
            for _ in range(wanted - len(staying)):
                yield Vacancy(node.name, next(free))

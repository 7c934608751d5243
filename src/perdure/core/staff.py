"""The worker processes of a job: which exist, in which slot of which node, in what state. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record

PAUSE_S = 0.05
PAUSE_S_MAX = 10.0
"""After a failed start the next one on that node waits: so long, then twice as long, up to the most."""

AT_ONCE = 3
"""So many failed starts in a row are followed by the next without a pause, if the last one was killed."""


@dataclass
class Node:
    """A machine with an agent: how many workers and standbys it is to hold.

    `failed_starts` in a row, each of a worker that was started after the one before, put the next one off
    to `hire_from`.
    """

    name: str
    host: str
    workers: int
    standby: int
    rank: int
    lost_at: float | None = None
    failed_starts: int = 0
    hire_from: float = float("-inf")
    _counts_from: WorkerId = 0

    def start_failed(self, worker: WorkerId, newest: WorkerId, now: float, killed: bool = False) -> None:
        """A worker never got to work; of those that were started together, up to `newest`, one counts.

        `killed`: by a signal, when it had come to its first step.
        """
        if worker >= self._counts_from:
            self.failed_starts += 1
            self._counts_from = newest + 1
        if not (killed and self.failed_starts <= AT_ONCE):
            self.hire_from = now + min(PAUSE_S * 2 ** min(self.failed_starts - 1, 30), PAUSE_S_MAX)

    def start_succeeded(self) -> None:
        """A worker has done its part of a step."""
        self.failed_starts = 0
        self.hire_from = float("-inf")


@dataclass
class Worker:
    """One process. `slot` is its local rank; slots from `Node.workers` on are standbys at their start.

    It is `proven` once a step is committed in which it took part, the first of which is `first_step`; after a
    coordinator's restart also if it was at its first step when the one before was lost.
    """

    id: WorkerId
    node: str
    slot: int
    pid: int = 0
    joined: bool = False
    ready: bool = False
    first_step: int | None = None
    proven: bool = False
    leaving: bool = False
    released: bool = False
    stopped: bool = False
    ending: bool = False
    finished: int | None = None
    broke_off: bool = False
    last_record: Record | None = None
    last_digest: str = ""
    crash: msg.Crashed | None = None
    ending_since: float | None = None
    progress: msg.Progress | None = None

    @property
    def began_at(self) -> float:
        """The first step in which it took part, as far as is known; infinite while there is none."""
        return math.inf if self.first_step is None else self.first_step


@dataclass(frozen=True)
class Vacancy:
    """A place for a worker to be started in."""

    node: str
    slot: int


@dataclass
class Staff:
    """Nodes and workers; `done` are the places (node, slot) whose script has ended well.

    `joins` says that a worker, perhaps one that is gone, has called `perdure.join`: the script uses perdure.
    """

    first_id: WorkerId = 0
    joins: bool = False
    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)

    def hire(self, vacancy: Vacancy) -> Worker:
        """A new worker with an id that was never used."""
        worker = Worker(self.first_id, vacancy.node, vacancy.slot)
        self.first_id += 1
        self.workers[worker.id] = worker
        return worker

    def on(self, node: str) -> list[Worker]:
        """The workers of a node."""
        return [worker for worker in self.workers.values() if worker.node == node]

    def at_work(self, besides: WorkerId | None = None) -> bool:
        """Whether there are workers that have done a step and go on, besides this one."""
        workers = (worker for worker in self.workers.values() if worker.id != besides)
        return any(worker.proven and not (worker.released or worker.stopped) for worker in workers)

    @property
    def present(self) -> int:
        """How many nodes there are, without those whose connection is broken."""
        return sum(node.lost_at is None for node in self.nodes.values())

    @property
    def free_rank(self) -> int:
        """The rank of the next node: the lowest that nobody has."""
        taken = {node.rank for node in self.nodes.values()}
        return next(rank for rank in itertools.count() if rank not in taken)

    @property
    def size(self) -> int:
        """How many workers the nodes at hand are to hold."""
        return sum(node.workers for node in self.nodes.values() if node.lost_at is None)

    @property
    def target(self) -> int:
        """How many members the job is to have: all but those that are through, or in their script's tail."""
        in_tail = sum(w.released and not (w.leaving or w.stopped) for w in self.workers.values())
        return self.size - len(self.done) - in_tail

    def vacancies(self, standbys: bool) -> Iterator[Vacancy]:
        """Places without a worker that stays; standbys only once the script is known to use perdure."""
        for node in self.nodes.values():
            if node.lost_at is not None:
                continue
            staying = [worker for worker in self.on(node.name) if not (worker.leaving or worker.stopped)]
            done = {slot for name, slot in self.done if name == node.name}
            wanted = node.workers - len(done) + (node.standby if standbys and not self.done else 0)
            taken = {worker.slot for worker in self.on(node.name) if not worker.stopped} | done
            free = (slot for slot in range(wanted + len(taken) + 1) if slot not in taken)
            for _ in range(wanted - len(staying)):
                yield Vacancy(node.name, next(free))

"""Work that is dealt out after a commit: evaluation, saving. Pure.

A task is named by (step, index): the index-th such call of the commit of a step, the same on all workers.
Workers that reach the call ask; its items are dealt to those that asked, one at a time; an item of a
worker that dies is dealt again; when all results are in, everybody who asked, now or later, gets all of
them in the order of the items. So the answer does not depend on who computed what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.schema.ids import WorkerId

Key = tuple[int, int]


@dataclass(frozen=True)
class Deal:
    """Compute this item."""

    worker: WorkerId
    key: Key
    item: int


@dataclass(frozen=True)
class Answer:
    """All results of a task, in order."""

    worker: WorkerId
    key: Key
    values: tuple[Mapping[str, float], ...]
    weights: tuple[float, ...]


@dataclass
class _Task:
    count: int
    results: dict[int, tuple[Mapping[str, float], float]] = field(default_factory=dict)
    working: dict[WorkerId, int] = field(default_factory=dict)
    idle: list[WorkerId] = field(default_factory=list)

    def free(self) -> list[int]:
        busy = set(self.working.values())
        return [item for item in range(self.count) if item not in self.results and item not in busy]


class Tasks:
    """All tasks of the newest committed steps."""

    def __init__(self) -> None:
        self._tasks: dict[Key, _Task] = {}

    def restart(self) -> None:
        """Every worker was lost: the steps that come again have tasks of their own."""
        self._tasks.clear()

    def ask(self, worker: WorkerId, key: Key, count: int) -> list[Deal | Answer]:
        """A worker takes part in a task of `count` items. Asked again, it has nothing in hand."""
        for old in [k for k in self._tasks if k[0] < key[0] - 1]:
            del self._tasks[old]
        task = self._tasks.setdefault(key, _Task(count))
        task.working.pop(worker, None)
        if worker not in task.idle:
            task.idle.append(worker)
        return self._go_on(key, task)

    def result(
        self, worker: WorkerId, key: Key, item: int, values: Mapping[str, float], weight: float
    ) -> list[Deal | Answer]:
        """A worker computed an item; one that the task does not have is no result."""
        task = self._tasks.get(key)
        if task is None or item not in range(task.count):
            return []
        task.results.setdefault(item, (values, weight))
        if task.working.pop(worker, None) is not None:
            task.idle.append(worker)
        return self._go_on(key, task)

    def lost(self, worker: WorkerId) -> list[Deal | Answer]:
        """A worker died: its items are dealt again."""
        out: list[Deal | Answer] = []
        for key, task in self._tasks.items():
            task.working.pop(worker, None)
            task.idle = [w for w in task.idle if w != worker]
            out += self._go_on(key, task)
        return out

    def _go_on(self, key: Key, task: _Task) -> list[Deal | Answer]:
        if len(task.results) == task.count:
            values = tuple(task.results[item][0] for item in range(task.count))
            weights = tuple(task.results[item][1] for item in range(task.count))
            idle, task.idle = task.idle, []
            return [Answer(worker, key, values, weights) for worker in idle]
        out: list[Deal | Answer] = []
        for item in task.free():
            if not task.idle:
                break
            worker = task.idle.pop(0)
            task.working[worker] = item
            out.append(Deal(worker, key, item))
        return out

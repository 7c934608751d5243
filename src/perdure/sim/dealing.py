"""Who gets which nodes: the first plan, which is the same for all policies, and the planner of those that
have one.

The planner is `perdure.core.allocation`, asked at every loss, return, end and submission. A job that was
hit is charged no penalty for changing, since it pays for a transition anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from perdure.core.allocation import Demand, allocate
from perdure.core.cost import gains
from perdure.core.policies.work import Workload
from perdure.sim.job import JobRun

RunningTime = Callable[[int], float]


class Planner:
    """Plans for a fixed set of jobs, kept, since the same situations come back."""

    def __init__(
        self, works: Sequence[Workload], transitions: Sequence[float], nodes_max: int, running_s: RunningTime
    ) -> None:
        self._wafs = {work.name: work.weight * work.curve.flops_per_s for work in works}
        self._transitions = {work.name: wait for work, wait in zip(works, transitions, strict=True)}
        self._nodes_max = nodes_max
        self._running_s = running_s
        self.running_s = running_s(nodes_max)
        self._kept: dict[tuple[object, ...], dict[str, int]] = {}

    def plan(
        self, holding: dict[str, int], nodes: int, failed: frozenset[str] = frozenset()
    ) -> dict[str, int]:
        """The nodes of each job of `holding` (what it has now) when `nodes` work; at most the planned
        number.
        """
        nodes = min(nodes, self._nodes_max)
        key = (tuple(holding.items()), nodes, failed)
        if key not in self._kept:
            self._kept[key] = self._make(holding, nodes, failed)
        return self._kept[key]

    def _make(self, holding: dict[str, int], nodes: int, failed: frozenset[str]) -> dict[str, int]:
        if len(holding) == 1:
            ((name, current),) = holding.items()
            return {name: self._alone(name, current, nodes, name in failed)}
        demands = [
            Demand(
                name,
                self._wafs[name],
                min(current, nodes),
                0.0 if name in failed or current == 0 else self._transitions[name],
            )
            for name, current in holding.items()
        ]
        return allocate(demands, nodes, self._running_s).nodes

    def _alone(self, name: str, current: int, nodes: int, failed: bool) -> int:
        """One job: no table is needed, only the best of its own options; among equals what it has, then
        fewer.
        """
        waf = self._wafs[name]
        options = np.arange(min(nodes, waf.size - 1) + 1)
        cost_s = 0.0 if failed or current == 0 else self._transitions[name]
        worth = gains(waf, current, options, self._running_s(nodes), cost_s)
        best = int(np.argmax(worth))
        return current if current < options.size and worth[current] >= worth[best] else best


def moves(
    jobs: Sequence[JobRun],
    targets: dict[str, int],
    leaving: set[int],
    slow: Collection[int],
    free: Sequence[int],
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(take, give) of every job whose nodes have to change to meet `targets`; what some give others may take.

    Nodes about to leave are given whatever the target; of the others the newest go first. Slow ones that are
    given rest until they are fast again.
    """
    gives: dict[str, tuple[int, ...]] = {}
    for job in jobs:
        forced = tuple(node for node in job.held if node in leaving) if leaving else ()
        over = len(job.held) - len(forced) - targets.get(job.name, 0)
        chosen: list[int] = []
        if over > 0:
            for node in reversed(job.held):
                if node not in leaving:
                    chosen.append(node)
                    if len(chosen) == over:
                        break
        gives[job.name] = (*forced, *chosen)
    given = [node for nodes in gives.values() for node in nodes]
    supply = [*free, *(node for node in given if node not in leaving and node not in slow)]
    found = {}
    for job in jobs:
        give = gives[job.name]
        missing = targets.get(job.name, 0) - (len(job.held) - len(give))
        take = tuple(supply[:missing]) if missing > 0 else ()
        del supply[: len(take)]
        if take or give:
            found[job.name] = (take, give)
    return found

"""Which job gets how many nodes: exact dynamic programming, and every single event's outcome computed ahead.

The plan maximises Σ G(job, nodes) (`perdure.core.cost`) with Σ nodes ≤ N, by

    S(i, j) = max over k of S(i − 1, j − k) + G(i, k)

vectorised over j. `S` from the left (jobs before i) and from the right (jobs after i) answer, together, what
is best for everyone else whatever happens to job i:

    finish of i       max over a of left(i, a) + right(i, N − a)
    loss of i's node  the same at N − 1 with G of a failed job folded in between
    loss when idle    the table at N − 1;  return of a node: the table at N + 1
    submission        max over k of S(all, N − k) + G(new, k), from the kept table

so an event costs a look-up (a submission: one pass over the new job's options, then reading the kept
choices).

Two details make it dependable. Gains are rounded to a grid on which all sums are exact in floating point, so
equal plans compare equal whatever the order of addition. Among equal plans every job keeps what it has, then
fewer nodes win: no plan is changed for nothing, and nodes that help nobody stay idle as spares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.core.cost import gains

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
RunningTime = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Demand:
    """A job as the planner sees it.

    `waf[n]` is its weighted FLOP/s on n nodes, 0 where it cannot run and at n = 0; more nodes than that
    change nothing. It holds `current` nodes; a change costs it `transition_s` seconds of its present work.
    """

    name: str
    waf: Floats
    current: int = 0
    transition_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.waf.size or self.waf[0] != 0 or not np.isfinite(self.waf).all() or (self.waf < 0).any():
            raise ValueError(f"{self.name}: waf must start with 0 and be finite and not negative")
        if self.current < 0 or not 0 <= self.transition_s < math.inf:
            raise ValueError(f"{self.name}: current and transition_s must be finite and not negative")

    def at(self, nodes: int) -> float:
        """Weighted FLOP/s on `nodes` nodes."""
        return float(self.waf[min(nodes, self.waf.size - 1)])

    @property
    def options(self) -> Ints:
        """Node counts worth considering, `current` first, then ascending.

        A count that fewer nodes equal or beat is left out: the fewer are never worse, for this job or others.
        """
        best = np.maximum.accumulate(self.waf)
        rises = np.append(True, best[1:] > best[:-1])
        counts = np.flatnonzero(rises)
        return np.concatenate(([self.current], counts[counts != self.current])).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Plan:
    """`nodes[name]` for every job, and what the plan is worth: Σ G in weighted FLOP."""

    nodes: dict[str, int]
    value: float


@dataclasses.dataclass(frozen=True)
class _Options:
    """The node counts of one job and their gains on the grid."""

    nodes: Ints
    gains: Floats


@dataclasses.dataclass(frozen=True)
class _Table:
    """`value[j]`: the best gain of the jobs so far on at most j nodes; `choice[j]`: the last one's option."""

    value: Floats
    choice: NDArray[np.int32]


class _Tables:
    """The tables of a sequence of jobs, folded in that order, on 0 … `nodes` nodes."""

    def __init__(self, options: Sequence[_Options], nodes: int) -> None:
        self.options = options
        start = _Table(np.zeros(nodes + 1), np.zeros(0, dtype=np.int32))
        self.tables = [start]
        for job in options:
            self.tables.append(_fold(self.tables[-1].value, job))

    def value(self, jobs: int) -> Floats:
        """The table of the first `jobs` jobs."""
        return self.tables[jobs].value

    def read(self, jobs: int, nodes: int) -> list[int]:
        """The best allocation of the first `jobs` jobs on at most `nodes` nodes."""
        found = []
        for job in range(jobs, 0, -1):
            taken = int(self.options[job - 1].nodes[self.tables[job].choice[nodes]])
            found.append(taken)
            nodes -= taken
        return found[::-1]


def _fold(before: Floats, job: _Options) -> _Table:
    """The table with one more job: the (max, +) convolution of `before` with the job's gains."""
    size = before.size
    value = np.full(size, -np.inf)
    choice = np.zeros(size, dtype=np.int32)
    candidate, better = np.empty(size), np.empty(size, dtype=bool)
    for index, (nodes, gain) in enumerate(zip(job.nodes.tolist(), job.gains.tolist(), strict=True)):
        if nodes >= size:
            continue
        length = size - nodes
        np.add(before[:length], gain, out=candidate[:length])
        np.greater(candidate[:length], value[nodes:], out=better[:length])
        np.copyto(value[nodes:], candidate[:length], where=better[:length])
        np.copyto(choice[nodes:], index, where=better[:length])
    return _Table(value, choice)


def _split(left: Floats, right: Floats, nodes: int, preferred: int) -> tuple[int, float]:
    """The best share of `nodes` for the left table, and its value; `preferred` among equals."""
    total = left[: nodes + 1] + right[nodes::-1]
    best = int(np.argmax(total))
    if preferred <= nodes and total[preferred] == total[best]:
        best = preferred
    return best, float(total[best])


class Allocator:
    """The gains of a set of jobs under one function D_running(nodes), all on one grid."""

    def __init__(self, demands: Sequence[Demand], running_s: RunningTime, nodes_max: int) -> None:
        self.demands = tuple(demands)
        self.running_s = running_s
        self._options = [demand.options for demand in self.demands]
        longest = max(running_s(nodes) for nodes in (max(1, nodes_max - 2), max(1, nodes_max)))
        bound = sum(float(demand.waf.max()) * (longest + demand.transition_s) for demand in self.demands)
        # Multiples of a power of two whose sums stay below 2^53 multiples: every sum is exact.
        self._grid = math.ldexp(1.0, math.frexp(bound)[1] - 51) if bound > 0 else 0.0

    def options(self, job: int, nodes: int, failed: bool = False) -> _Options:
        """The options of one job when `nodes` nodes are alive."""
        return self.gains_of(self.demands[job], self._options[job], nodes, failed)

    def gains_of(self, demand: Demand, counts: Ints, nodes: int, failed: bool = False) -> _Options:
        """The options `counts` of any job, on this grid, when `nodes` nodes are alive."""
        exact = gains(demand.waf, demand.current, counts, self.running_s(nodes), demand.transition_s, failed)
        return _Options(counts, np.rint(exact / self._grid) * self._grid if self._grid else exact)

    def tables(self, nodes: int, backwards: bool = False) -> _Tables:
        """The tables of all jobs when `nodes` nodes are alive; from the last job if `backwards`."""
        jobs = range(len(self.demands))
        return _Tables([self.options(job, nodes) for job in (reversed(jobs) if backwards else jobs)], nodes)


def allocate(demands: Sequence[Demand], nodes: int, running_s: RunningTime) -> Plan:
    """The best plan for `nodes` nodes. O(jobs · options · nodes)."""
    tables = Allocator(demands, running_s, nodes).tables(nodes)
    count = len(demands)
    found = tables.read(count, nodes)
    named = {demand.name: taken for demand, taken in zip(demands, found, strict=True)}
    return Plan(named, float(tables.value(count)[nodes]))


class Outlook:
    """The answers to every single event, computed ahead for jobs that hold their `current` nodes.

    Build it after each change of plan, with the new allocation as `current`; until it is built, the old one
    answers. About six times the work of `allocate`.
    """

    def __init__(self, demands: Sequence[Demand], nodes: int, running_s: RunningTime) -> None:
        held = sum(demand.current for demand in demands)
        if held > nodes:
            raise ValueError(f"the jobs hold {held} nodes of {nodes}")
        self.nodes = nodes
        self.demands = tuple(demands)
        self.allocator = Allocator(demands, running_s, nodes + 1)
        self.left = self.allocator.tables(nodes)
        self.right = self.allocator.tables(nodes, backwards=True)
        self._held_before = np.cumsum([0, *(demand.current for demand in demands)]).tolist()
        self._finished = {demand.name: self._after_finish(job) for job, demand in enumerate(demands)}
        self._lost = self._after_losses()
        wider = self.allocator.tables(nodes + 1)
        self._gained = self._plan(
            wider.read(len(demands), nodes + 1), float(wider.value(len(demands))[nodes + 1])
        )

    def lose(self, name: str | None) -> Plan:
        """The plan after one node of job `name` is lost, or an idle node (`None`). Raises `KeyError`."""
        return self._lost[name]

    def gain(self) -> Plan:
        """The plan after one node came (back)."""
        return self._gained

    def finish(self, name: str) -> Plan:
        """The plan after job `name` has ended. Raises `KeyError`."""
        return self._finished[name]

    def stay(self) -> Plan:
        """The plan at the present number of nodes when nothing has happened."""
        count = len(self.demands)
        return self._plan(self.left.read(count, self.nodes), float(self.left.value(count)[self.nodes]))

    def submit(self, demand: Demand) -> Plan:
        """The plan with one more job, from the kept tables. O(options of the new job + jobs)."""
        new = self.allocator.gains_of(demand, demand.options, self.nodes)
        fits = new.nodes <= self.nodes
        counts, worth = new.nodes[fits], new.gains[fits]
        everyone = len(self.demands)
        total = self.left.value(everyone)[self.nodes - counts] + worth
        best = int(np.argmax(total))
        taken = int(counts[best])
        found = self.left.read(everyone, self.nodes - taken)
        plan = self._plan(found, float(total[best]))
        return Plan({**plan.nodes, demand.name: taken}, plan.value)

    def _plan(self, found: list[int], value: float, without: int | None = None) -> Plan:
        names = [demand.name for job, demand in enumerate(self.demands) if job != without]
        return Plan(dict(zip(names, found, strict=True)), value)

    def _after_finish(self, job: int) -> Plan:
        after = len(self.demands) - 1 - job
        share, value = _split(
            self.left.value(job), self.right.value(after), self.nodes, self._held_before[job]
        )
        found = self.left.read(job, share) + self.right.read(after, self.nodes - share)[::-1]
        return self._plan(found, value, without=job)

    def _after_losses(self) -> dict[str | None, Plan]:
        """By job that lost a node; under None the loss of an idle one."""
        nodes, count = self.nodes - 1, len(self.demands)
        if nodes < 0:
            return {}
        left, right = self.allocator.tables(nodes), self.allocator.tables(nodes, backwards=True)
        plans: dict[str | None, Plan] = {}
        if self._held_before[-1] < self.nodes:
            plans[None] = self._plan(left.read(count, nodes), float(left.value(count)[nodes]))
        for job, demand in enumerate(self.demands):
            if demand.current == 0:
                continue
            options, after = self.allocator.options(job, nodes, failed=True), count - 1 - job
            failed = _fold(left.value(job), options)
            share, value = _split(failed.value, right.value(after), nodes, self._held_before[job + 1])
            taken = int(options.nodes[failed.choice[share]])
            found = [*left.read(job, share - taken), taken, *right.read(after, nodes - share)[::-1]]
            plans[demand.name] = self._plan(found, value)
        return plans

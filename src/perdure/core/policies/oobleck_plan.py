"""Oobleck's pipelines: instantiation, batch distribution, and what happens when nodes are lost.

(Jang et al., SOSP'23, sections 4.2 and 5.) A pipeline is a tuple of nodes; one of n nodes runs
template(n), so pipelines of different sizes cut the layers at different places and gradients are summed
layer by layer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Pipelines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The pipelines after a loss, how each came about, and the layers that each node has to fetch."""

    pipelines: Pipelines
    steps: tuple[str, ...]
    fetches: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Restart:
    """Recovery from live state is impossible: why, and whether enough nodes are left to restart at once."""

    reason: str
    enough_nodes: bool


def partitions(total: int, parts: Sequence[int], at_least: int) -> Iterator[tuple[int, ...]]:
    """All multisets of `parts` with sum `total` and `at_least` members, each in decreasing order."""

    ordered = sorted(set(parts))

    def extend(left: int, top: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if left == 0:
            if len(chosen) >= at_least:
                yield chosen
            return
        for index in range(top, -1, -1):
            if ordered[index] <= left:
                yield from extend(left - ordered[index], index, (*chosen, ordered[index]))

    yield from extend(total, len(ordered) - 1, ())


class BestRates:
    """The multiset of sizes with a given sum whose rates add up to the most, for every sum up to a limit.

    What instantiation comes to when the multisets are too many to list: with batches split at will a step
    takes (micro-batches) / Σ rate. One dynamic program answers every sum.
    """

    def __init__(self, rates: dict[int, float], limit: int) -> None:
        self._rates = rates
        best = [0.0] + [-math.inf] * limit
        self._last = [0] * (limit + 1)
        for total in range(1, limit + 1):
            for size, rate in rates.items():
                if size <= total and best[total - size] + rate > best[total]:
                    best[total], self._last[total] = best[total - size] + rate, size

    def members(self, total: int, at_least: int) -> tuple[int, ...] | None:
        """The best multiset with sum `total` and `at_least` members, in decreasing order, or None."""
        chosen: list[int] = []
        while total and self._last[total]:
            chosen.append(self._last[total])
            total -= self._last[total]
        while not total and 0 < len(chosen) < at_least:
            chosen.sort()
            largest = chosen.pop()
            halves = (largest // 2, largest - largest // 2)
            if halves[0] not in self._rates or halves[1] not in self._rates:
                return None
            chosen.extend(halves)
        return tuple(sorted(chosen, reverse=True)) if chosen and not total else None


def distribute(
    micro_batches: int, fill_s: Sequence[float], slowest_s: Sequence[float]
) -> tuple[int, ...] | None:
    """Integers b(i) ≥ 1 with sum `micro_batches` that minimise the greatest fill(i) + (b(i) − 1)·slowest(i).

    Giving each further micro-batch to the pipeline that would finish first is optimal, since every latency
    grows with its own batch alone. None if there are fewer micro-batches than pipelines.
    """
    count = len(fill_s)
    if micro_batches < count:
        return None
    batches = [1] * count
    left = micro_batches - count
    rate = sum(1.0 / slowest for slowest in slowest_s)
    # No distribution is done earlier than this, so each pipeline gets all but one of what it can do by then.
    finish = left / rate + min(fill_s)
    for index in range(count):
        sure = min(left, int(max(0.0, (finish - fill_s[index]) / slowest_s[index] - 1)))
        batches[index] += sure
        left -= sure
    queue = [(fill_s[i] + batches[i] * slowest_s[i], i) for i in range(count)]
    heapq.heapify(queue)
    for _ in range(left):
        latency, index = queue[0]
        batches[index] += 1
        heapq.heapreplace(queue, (latency + slowest_s[index], index))
    return tuple(batches)


def makespan(micro_batches: int, groups: Sequence[tuple[int, float, float]]) -> float:
    """The greatest latency under the best distribution; groups are (pipelines, fill, slowest) of one
    template.

    The same as `distribute`, at a cost that does not grow with the number of pipelines. Infinite if there are
    fewer micro-batches than pipelines.
    """
    left = micro_batches - sum(count for count, _, _ in groups)
    if left < 0:
        return math.inf
    rate = sum(count / slowest for count, _, slowest in groups)
    finish = left / rate + min(fill for _, fill, _ in groups)
    queue, worst = [], 0.0
    for index, (count, fill, slowest) in enumerate(groups):
        sure = min(left // count, int(max(0.0, (finish - fill) / slowest - 1)))
        left -= sure * count
        worst = max(worst, fill + sure * slowest)
        queue.append((fill + (sure + 1) * slowest, index))
    heapq.heapify(queue)
    while left > 0:
        latency, index = queue[0]
        count, _, slowest = groups[index]
        left -= min(left, count)
        worst = max(worst, latency)
        heapq.heapreplace(queue, (latency + slowest, index))
    return worst


def regroup(
    pipelines: Pipelines, lost: frozenset[int], least: int, copies: int = 1
) -> tuple[Pipelines, tuple[str, ...]]:
    """The pipelines of the survivors, each of `least` nodes or more, and how they came about.

    A pipeline that keeps `least` nodes goes on with them; one that does not borrows from the largest while
    that keeps `least`; when nobody can lend, those that are short are merged, and if even together they
    are short, the smallest of the others is merged with them. The result has as many pipelines as the
    nodes left allow unless more were there before. There must be `least` survivors. Pipelines that stay
    are the same objects.
    """
    after: list[tuple[int, ...]] = list(pipelines)
    steps, short = [], []
    for index in hit(pipelines, lost):
        after[index] = tuple(node for node in pipelines[index] if node not in lost)
        if len(after[index]) >= least:
            steps.append(f"pipeline {index} goes on with {len(after[index])} nodes")
        elif after[index]:
            short.append(index)
    if short:
        lenders = [(-len(rest), index) for index, rest in enumerate(after) if len(rest) > least]
        heapq.heapify(lenders)
        for index in short:
            _borrow(after, index, lenders, least, steps)
    pool = tuple(node for index in short if len(after[index]) < least for node in after[index])
    whole = [rest for rest in after if len(rest) >= least]
    if pool and len(pool) < least:
        smallest = min(range(len(whole)), key=lambda index: len(whole[index]))
        pool = whole.pop(smallest) + pool
    if pool:
        count = len(pool) // least
        steps.append(f"{len(pool)} nodes of short pipelines are merged into {count}")
        size, more = divmod(len(pool), count)
        start = 0
        for index in range(count):
            stop = start + size + (index < more)
            whole.append(pool[start:stop])
            start = stop
    nodes = sum(map(len, whole))
    while len(whole) < copies and nodes >= (len(whole) + 1) * least:
        lenders = [(-len(rest), index) for index, rest in enumerate(whole) if len(rest) > least]
        heapq.heapify(lenders)
        whole.append(())
        _borrow(whole, len(whole) - 1, lenders, least, steps)
    return tuple(whole), tuple(steps)


def hit(pipelines: Pipelines, lost: frozenset[int]) -> list[int]:
    """The pipelines that have lost a node."""
    if len(lost) == 1:
        (node,) = lost
        return [index for index, pipeline in enumerate(pipelines) if node in pipeline]
    return [index for index, pipeline in enumerate(pipelines) if not lost.isdisjoint(pipeline)]


def _borrow(
    after: list[tuple[int, ...]], index: int, lenders: list[tuple[int, int]], least: int, steps: list[str]
) -> None:
    """Pipeline `index` takes nodes from the largest ones until it has `least` or nobody can lend."""
    while len(after[index]) < least and lenders:
        _, lender = heapq.heappop(lenders)
        node = after[lender][-1]
        after[lender] = after[lender][:-1]
        after[index] = (*after[index], node)
        steps.append(f"pipeline {index} borrows node {node} from pipeline {lender}")
        if len(after[lender]) > least:
            heapq.heappush(lenders, (-len(after[lender]), lender))


def lost_layer(
    pipelines: Pipelines, lost: frozenset[int], layers_of: Callable[[int, int], range], layers: int
) -> int | None:
    """A layer that no survivor holds, or None. An intact pipeline holds them all."""
    if len(hit(pipelines, lost)) < len(pipelines):
        return None
    missing = set(range(layers))
    for pipeline in pipelines:
        for index, node in enumerate(pipeline):
            if node not in lost:
                missing.difference_update(layers_of(len(pipeline), index))
    return min(missing) if missing else None


def fetches(
    before: Pipelines, after: Pipelines, layers_of: Callable[[int, int], range]
) -> dict[int, tuple[int, ...]]:
    """The layers that nodes of changed pipelines need in their new places and did not hold."""
    kept = {id(pipeline) for pipeline in before}
    changed = [pipeline for pipeline in after if id(pipeline) not in kept]
    stayed = {id(pipeline) for pipeline in after}
    had = {
        node: layers_of(len(pipeline), index)
        for pipeline in before
        if id(pipeline) not in stayed
        for index, node in enumerate(pipeline)
    }
    found = {}
    for pipeline in changed:
        for index, node in enumerate(pipeline):
            mine = had.get(node, range(0))
            wanted = tuple(layer for layer in layers_of(len(pipeline), index) if layer not in mine)
            if wanted:
                found[node] = wanted
    return found


def reconfigure(
    pipelines: Pipelines,
    lost: frozenset[int],
    least: int,
    layers_of: Callable[[int, int], range],
    layers: int,
    copies: int = 1,
) -> Reconfigured | Restart:
    """What becomes of `pipelines` when the nodes `lost` die at the same moment.

    `layers_of(size, index)` are the layers that node number `index` of a pipeline of `size` nodes holds;
    `copies` pipelines (f + 1) are kept while the nodes allow it. A restart is needed exactly when fewer
    than `least` nodes are left or some layer has no live holder. Each survivor of a changed pipeline
    fetches the layers that its new place needs and that it did not hold, parameters and optimizer state,
    from any live holder.
    """
    survivors = sum(map(len, pipelines)) - len(lost)
    if survivors < least:
        return Restart(f"{survivors} nodes are left, a pipeline needs {least}", False)
    missing = lost_layer(pipelines, lost, layers_of, layers)
    if missing is not None:
        return Restart(f"layer {missing} has no live holder", True)
    after, steps = regroup(pipelines, lost, least, copies)
    return Reconfigured(after, steps, fetches(pipelines, after, layers_of))

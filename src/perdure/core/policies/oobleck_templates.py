"""Oobleck's pipeline templates: how one pipeline lies on n nodes (Jang et al., SOSP'23, section 4.1).

A pipeline of S stages that processes Nb = 4·S micro-batches takes T = T1 + T2 + T3 with

    T1 = Σ t(i)                       the first micro-batch passes all stages
    T2 = (Nb − S + k − 1)·t(k)        the slowest stage k works without a gap
    T3 = Σ t(i), i ≥ k                the last micro-batch leaves

(stages count from 0, t(i) is forward and backward of stage i). A stage never spans nodes. The template of n
nodes minimises T over all ways to cut the layers into stages and the GPUs of each node among its stages.

For a given time τ of the slowest stage, T is a sum over the stages: each adds t + 3τ, those before k add τ
and those from k on add t, and τ is taken off once. So one dynamic program over (node, GPU, layer, before
or after k) finds the best partition for every τ at once, and its answers for n = 1, 2, … nodes come with
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Layers `first` … `last`−1 on `gpus` GPUs of node `node` of the pipeline; `seconds` for one
    micro-batch.
    """

    first: int
    last: int
    node: int
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Template:
    """How one pipeline lies on `nodes` nodes; `iteration_s` is T for 4·S micro-batches."""

    nodes: int
    stages: tuple[StageSpan, ...]
    iteration_s: float

    @property
    def fill_s(self) -> float:
        """One micro-batch through all stages, forward and backward."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def slowest_s(self) -> float:
        return max(stage.seconds for stage in self.stages)

    def latency_s(self, micro_batches: int) -> float:
        """A step of `micro_batches` under one-forward-one-backward."""
        return self.fill_s + (micro_batches - 1) * self.slowest_s

    def layers_of(self, node: int) -> range:
        """The layers that node number `node` of the pipeline holds."""
        mine = [stage for stage in self.stages if stage.node == node]
        return range(mine[0].first, mine[-1].last)


def iteration_s(seconds: Sequence[float]) -> float:
    """T of a pipeline whose stages take `seconds`, by the formula above."""
    slowest = max(range(len(seconds)), key=lambda index: (seconds[index], -index))
    steady = (MICRO_BATCHES_PER_STAGE * len(seconds) - len(seconds) + slowest - 1) * seconds[slowest]
    return sum(seconds) + steady + sum(seconds[slowest:])


class Templates:
    """The templates of one model on nodes of one kind, made when they are first asked for.

    `layer_s[q]` gives each layer's seconds on q GPUs; q are powers of two up to `gpus_per_node`.
    """

    def __init__(self, layer_s: dict[int, Sequence[float]], gpus_per_node: int) -> None:
        self._seconds = {gpus: tuple(times) for gpus, times in layer_s.items() if gpus <= gpus_per_node}
        self._gpus = gpus_per_node
        self.layers = len(next(iter(self._seconds.values())))
        self._made: dict[int, Template | None] = {}

    def template(self, nodes: int) -> Template | None:
        """The best pipeline on `nodes` nodes; None if it would leave a node without a layer."""
        if nodes not in self._made:
            self._made[nodes] = self._make(nodes)
        return self._made[nodes]

    def _make(self, nodes: int) -> Template | None:
        if not 1 <= nodes <= self.layers:
            return None
        if all(max(times) - min(times) <= 1e-12 * max(times) for times in self._seconds.values()):
            return self._even(nodes)
        return search(tuple(sorted(self._seconds.items())), self._gpus, nodes)

    def _even(self, nodes: int) -> Template | None:
        """The best for layers that are all alike: equal stages, the longer ones first.

        With S stages T is then 2·Σt + (3·S − 1)·t(0) whatever the order of the shorter ones, so that the
        search reduces to the number of GPUs of a stage. A test holds that the full search finds nothing
        better.
        """
        best: Template | None = None
        for gpus, times in self._seconds.items():
            count = nodes * (self._gpus // gpus)
            if count > self.layers or self._gpus % gpus:
                continue
            per_node = self._gpus // gpus
            cuts = [0]
            for stage in range(count):
                cuts.append(cuts[-1] + self.layers // count + (stage < self.layers % count))
            stages = tuple(
                StageSpan(cuts[i], cuts[i + 1], i // per_node, gpus, times[0] * (cuts[i + 1] - cuts[i]))
                for i in range(count)
            )
            total = iteration_s([stage.seconds for stage in stages])
            if best is None or total < best.iteration_s:
                best = Template(nodes, stages, total)
        return best


@lru_cache(maxsize=256)
def search(seconds: tuple[tuple[int, tuple[float, ...]], ...], gpus: int, nodes: int) -> Template | None:
    """Every partition: the dynamic program for all τ at once, then once more for the best τ to read it
    off.
    """
    prefix = {q: np.concatenate(([0.0], np.cumsum(times))) for q, times in seconds}
    taus = np.unique(
        np.concatenate(
            [(table[None, :] - table[:, None])[np.triu_indices(len(table), 1)] for table in prefix.values()]
        )
    )
    totals = _forward(prefix, gpus, nodes, taus)[-1]
    best = int(np.argmin(totals))
    if not np.isfinite(totals[best]):
        return None
    return _read_off(prefix, gpus, nodes, float(taus[best]))


def _forward(prefix: dict[int, Floats], gpus: int, nodes: int, taus: Floats) -> list[Floats]:
    """The least T for 1 … `nodes` nodes and every τ of `taus` (infinite where no stage takes exactly τ)."""
    layers = len(next(iter(prefix.values()))) - 1
    state = np.full((2, layers + 1, len(taus)), np.inf)
    state[0, 0] = 0.0
    totals = []
    for _ in range(nodes):
        inside = [state, *(np.full_like(state, np.inf) for _ in range(gpus))]
        for used in range(gpus):
            for q, table in prefix.items():
                if used + q <= gpus:
                    for length in range(1, layers + 1):
                        _extend(inside[used], inside[used + q], table, length, taus)
        state = inside[gpus]
        totals.append(state[1, layers] - taus)
    return totals


def _extend(before: Floats, after: Floats, table: Floats, length: int, taus: Floats) -> None:
    """Add a stage of `length` layers to every partial pipeline of `before`."""
    spent = (table[length:] - table[:-length])[:, None]
    slack = 1e-12 * taus[-1]
    fits = spent <= taus + slack
    base = spent + 3 * taus
    source, target = before[:, : before.shape[1] - length], after[:, length:]
    np.minimum(target[0], np.where(fits, source[0] + base + taus, np.inf), out=target[0])
    slowest = np.where(np.abs(spent - taus) <= slack, source[0] + base + spent + taus, np.inf)
    later = np.where(fits, source[1] + base + spent, np.inf)
    np.minimum(target[1], np.minimum(slowest, later), out=target[1])


def _read_off(prefix: dict[int, Floats], gpus: int, nodes: int, tau: float) -> Template:
    """The partition behind the least T for one τ, by walking the dynamic program backwards."""
    taus = np.array([tau])
    layers = len(next(iter(prefix.values()))) - 1
    start = np.full((2, layers + 1, 1), np.inf)
    start[0, 0] = 0.0
    tables: list[list[Floats]] = []
    for _ in range(nodes):
        inside = [start, *(np.full_like(start, np.inf) for _ in range(gpus))]
        for used in range(gpus):
            for q, table in prefix.items():
                if used + q <= gpus:
                    for length in range(1, layers + 1):
                        _extend(inside[used], inside[used + q], table, length, taus)
        tables.append(inside)
        start = inside[gpus]
    stages: list[StageSpan] = []
    node, used, layer, phase = nodes - 1, gpus, layers, 1
    while layer:
        q, length, phase = _step_back(prefix, tables[node], used, layer, phase, tau)
        seconds = float(prefix[q][layer] - prefix[q][layer - length])
        stages.append(StageSpan(layer - length, layer, node, q, seconds))
        used, layer = used - q, layer - length
        if used == 0 and node > 0:
            node, used = node - 1, gpus
    stages.reverse()
    return Template(nodes, tuple(stages), iteration_s([stage.seconds for stage in stages]))


def _step_back(
    prefix: dict[int, Floats], inside: list[Floats], used: int, layer: int, phase: int, tau: float
) -> tuple[int, int, int]:
    """The stage that led to a state: its GPUs, its layers, and the phase before it."""
    goal = float(inside[used][phase, layer, 0])
    slack = 1e-9 * abs(goal)
    for q, table in prefix.items():
        if q > used:
            continue
        for length in range(1, layer + 1):
            spent = float(table[layer] - table[layer - length])
            if spent > tau * (1 + 1e-12):
                break
            base = spent + 3 * tau
            before = inside[used - q][:, layer - length, 0]
            if phase == 0 and abs(before[0] + base + tau - goal) <= slack:
                return q, length, 0
            if phase == 1 and abs(before[1] + base + spent - goal) <= slack:
                return q, length, 1
            if (
                phase == 1
                and abs(spent - tau) <= 1e-12 * tau
                and abs(before[0] + base + spent + tau - goal) <= slack
            ):
                return q, length, 0
    raise AssertionError("a finite state of the dynamic program has a predecessor")

"""Happenings from rates: every process that `[cluster.failures] kind` names, preemptions, slow and late
nodes.

All failure processes have the cluster's mean time between faults per node; they differ in how the faults are
spread (with infant mortality it is the mean of a node that is never repaired, and repairs make it young
again). Each stream of chance has a seed of its own, so that adding preemptions to a scenario does not
change its faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from perdure.core.policies.base import Method
from perdure.schema.cluster import Cluster, FailureProcess, Hours
from perdure.schema.errors import UsageError
from perdure.sim.happenings import METHODS, Happening, Kind, Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HOUR_S = 3600.0
EVENTS_MAX = 5_000_000
"""Events of one kind beyond which a trace is refused; a run takes some 30 µs for each."""
ROUNDS_MAX = 100_000
"""Faults of one node beyond which a process that feeds itself (repaired nodes that fail again) is refused."""


def generate(cluster: Cluster, days: float, seed: int) -> Trace:
    """Everything that happens to the cluster's nodes and spares in `days`. One seed, one trace."""
    span_s = days * 86_400.0
    nodes = cluster.nodes + cluster.spares
    _check_count(cluster, nodes, span_s)
    happenings = [
        *faults(cluster, nodes, span_s, _stream(seed, 1)),
        *preemptions(cluster, nodes, span_s, _stream(seed, 2)),
        *slow_spells(cluster, nodes, span_s, _stream(seed, 3)),
    ]
    late, absent = late_nodes(cluster, _stream(seed, 4))
    happenings.extend(late)
    happenings.sort(key=lambda event: event.time_s)
    return Trace(tuple(happenings), absent)


def _check_count(cluster: Cluster, nodes: int, span_s: float) -> None:
    """Refuse rates that would take for ever. Raises `UsageError`."""
    means = {
        "cluster.mtbf_hours_per_node": cluster.mtbf_hours_per_node,
        "cluster.preemption.mean_hours_per_node": cluster.preemption
        and cluster.preemption.mean_hours_per_node,
        "cluster.degradation.mean_hours_per_node": (
            cluster.degradation and cluster.degradation.mean_hours_per_node
        ),
    }
    for key, hours in means.items():
        expected = nodes * span_s / (hours * HOUR_S) if hours else 0.0
        if expected > EVENTS_MAX:
            made = f"{hours:.3g} h make {expected:.2g} events in {span_s / 86_400:g} days"
            raise UsageError(f"{key}: {made}, expected at most {EVENTS_MAX:.0g}: fewer days or rarer events")


def _stream(seed: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, purpose])


def draw_hours(hours: Hours, count: int, rng: np.random.Generator) -> Floats:
    """`count` times in seconds from a distribution in hours."""
    if hours.kind == "fixed":
        drawn = np.full(count, float(hours.fixed or 0.0))
    elif hours.kind == "uniform":
        drawn = rng.uniform(hours.min or 0.0, hours.max or 0.0, count)
    elif hours.kind == "exponential":
        drawn = rng.exponential(hours.mean or 0.0, count)
    else:
        drawn = rng.lognormal(math.log(hours.median or 1.0), hours.sigma or 0.0, count)
    return np.asarray(drawn * HOUR_S)


def faults(cluster: Cluster, nodes: int, span_s: float, rng: np.random.Generator) -> list[Happening]:
    """Faults of all severities over `span_s` seconds; none if the cluster gives no rate."""
    if cluster.mtbf_hours_per_node is None:
        return []
    mean_s = cluster.mtbf_hours_per_node * HOUR_S
    process = cluster.failures
    if process.kind in ("weibull", "infant"):
        return _renewed(cluster, nodes, span_s, mean_s, rng)
    times, where = _memoryless(process, nodes, span_s, mean_s, rng)
    severities, repairs = _natures(cluster, len(times), rng)
    return _as_faults(times, where, severities, repairs, rng)


def _memoryless(
    process: FailureProcess, nodes: int, span_s: float, mean_s: float, rng: np.random.Generator
) -> tuple[Floats, Ints]:
    """Poisson, bursts and lemons: times, sorted, and the node of each fault."""
    expected = nodes * span_s / mean_s
    bursts = process.burst_share if process.kind == "bursts" else 0.0
    count = int(rng.poisson(expected * (1 - bursts)))
    times = rng.uniform(0, span_s, count)
    if process.kind == "lemons":
        lemons = max(1, round(process.lemon_share * nodes)) if process.lemon_share > 0 else 0
        weight = np.where(np.arange(nodes) < lemons, process.factor, 1.0)
        weight = rng.permutation(weight)
        where = rng.choice(nodes, count, p=weight / weight.sum())
    else:
        where = rng.integers(0, nodes, count)
    if bursts:
        size = min(process.burst_nodes, nodes)
        number = int(rng.poisson(expected * bursts / size))
        starts = rng.uniform(0, span_s, number)
        first = rng.integers(0, nodes - size + 1, number)
        times = np.concatenate((times, np.repeat(starts, size)))
        where = np.concatenate((where, (first[:, None] + np.arange(size)).ravel()))
    order = np.argsort(times, kind="stable")
    return times[order], np.asarray(where[order])


def _renewed(
    cluster: Cluster, nodes: int, span_s: float, mean_s: float, rng: np.random.Generator
) -> list[Happening]:
    """Weibull: independent gaps, running since long. Infant mortality: age counts from the start and
    repairs.
    """
    process = cluster.failures
    born, last, alive = np.zeros(nodes), np.zeros(nodes), np.arange(nodes)
    found: list[Happening] = []
    first = process.kind == "weibull"
    rounds = 0
    while alive.size:
        rounds += 1
        if len(found) > EVENTS_MAX or rounds > ROUNDS_MAX:
            raise UsageError(
                f"cluster.failures: more than {len(found):,} faults, expected a milder process: a "
                "repaired node fails again at once"
            )
        if first:
            gap, first = _first_weibull(process.shape, nodes, mean_s, rng), False
        else:
            gap = _next_fault(process, last[alive] - born[alive], span_s, mean_s, rng)
        times = last[alive] + gap
        inside = times < span_s
        alive, times = alive[inside], times[inside]
        severities, repairs = _natures(cluster, len(times), rng)
        found.extend(_as_faults(times, alive, severities, repairs, rng))
        last[alive] = times + np.where(severities == 1, repairs, 0.0)
        born[alive] = np.where(severities == 1, last[alive], born[alive])
    return found


def _first_weibull(shape: float, count: int, mean_s: float, rng: np.random.Generator) -> Floats:
    """The rest of the gap that a process which has run for long is in at time 0.

    Such a gap is length-biased: scale·G^(1/shape) with G from Gamma(1 + 1/shape); a uniform part of it is
    left.
    """
    gaps = mean_s / math.gamma(1 + 1 / shape) * rng.gamma(1 + 1 / shape, 1.0, count) ** (1 / shape)
    return np.asarray(gaps * rng.uniform(0, 1, count))


def _next_fault(
    process: FailureProcess, age_s: Floats, span_s: float, mean_s: float, rng: np.random.Generator
) -> Floats:
    """Seconds to the next fault of nodes of the given ages."""
    if process.kind == "weibull":
        return np.asarray(mean_s / math.gamma(1 + 1 / process.shape) * rng.weibull(process.shape, age_s.size))
    # Rate λ·(1 + (f − 1)·e^(−age/τ)), λ such that an undisturbed node has its mean number of faults. Its
    # integral up to age a is H(a) = λ·(a + (f − 1)·τ·(1 − e^(−a/τ))); the next fault is where H has grown by
    # a draw from Exp(1).
    decay_s, extra = process.decay_hours * HOUR_S, process.factor - 1
    rate = span_s / mean_s / (span_s + extra * decay_s * -math.expm1(-span_s / decay_s))
    goal = rng.exponential(1.0, age_s.size) / rate + age_s - extra * decay_s * np.expm1(-age_s / decay_s)
    low, high = age_s.copy(), goal.copy()  # H(a)/λ ≥ a, so the age sought is at most `goal`
    for _ in range(60):
        middle = (low + high) / 2
        short = middle - extra * decay_s * np.expm1(-middle / decay_s) < goal
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.asarray(high - age_s)


def _natures(cluster: Cluster, count: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Severities and repair times in seconds."""
    severities = rng.choice((1, 2, 3), count, p=cluster.severity.shares)
    return np.asarray(severities), draw_hours(cluster.repair_hours, count, rng)


def _as_faults(
    times: Floats, where: Ints, severities: Ints, repairs: Floats, rng: np.random.Generator
) -> list[Happening]:
    shows = rng.uniform(0, 1, len(times))
    return [
        Happening(
            time, Kind.FAULT, node, severity, _method(severity, chance), repair if severity == 1 else 0.0
        )
        for time, node, severity, repair, chance in zip(
            times.tolist(), where.tolist(), severities.tolist(), repairs.tolist(), shows.tolist(), strict=True
        )
    ]


def _method(severity: int, chance: float) -> Method:
    table = METHODS[severity]
    left = chance * sum(weight for _, weight in table)
    for method, weight in table:
        left -= weight
        if left < 0:
            return method
    return table[-1][0]


def preemptions(cluster: Cluster, nodes: int, span_s: float, rng: np.random.Generator) -> list[Happening]:
    """Nodes taken back by their owner, with or without notice, and returned."""
    spec = cluster.preemption
    if spec is None:
        return []
    count = int(rng.poisson(nodes * span_s / (spec.mean_hours_per_node * HOUR_S)))
    times = np.sort(rng.uniform(0, span_s, count))
    where = rng.integers(0, nodes, count)
    absent = draw_hours(spec.absent_hours, count, rng)
    noticed = rng.uniform(0, 1, count) < spec.notice_share
    found: list[Happening] = []
    back = [0.0] * nodes
    for time, node, away, notice in zip(
        times.tolist(), where.tolist(), absent.tolist(), noticed.tolist(), strict=True
    ):
        if time < back[node]:
            continue  # it is not there to be taken
        if notice and spec.notice_s > 0:
            found.append(Happening(time, Kind.NOTICE, node, lasts_s=spec.notice_s))
            time += spec.notice_s
        back[node] = time + away
        found.append(Happening(time, Kind.REMOVE, node))
        found.append(Happening(back[node], Kind.ADD, node))
    return found


def slow_spells(cluster: Cluster, nodes: int, span_s: float, rng: np.random.Generator) -> list[Happening]:
    """Nodes that become slow for a while."""
    spec = cluster.degradation
    if spec is None:
        return []
    count = int(rng.poisson(nodes * span_s / (spec.mean_hours_per_node * HOUR_S)))
    times = np.sort(rng.uniform(0, span_s, count))
    where = rng.integers(0, nodes, count)
    lasts = draw_hours(spec.lasts_hours, count, rng)
    return [
        Happening(time, Kind.SLOW, node, lasts_s=spell, factor=spec.slowdown)
        for time, node, spell in zip(times.tolist(), where.tolist(), lasts.tolist(), strict=True)
    ]


def late_nodes(cluster: Cluster, rng: np.random.Generator) -> tuple[Iterable[Happening], frozenset[int]]:
    """The last nodes of the cluster, which arrive after the start."""
    if cluster.late is None:
        return (), frozenset()
    where = range(cluster.nodes - cluster.late.nodes, cluster.nodes)
    arrive = draw_hours(cluster.late.arrive_hours, len(where), rng).tolist()
    return [Happening(time, Kind.ADD, node) for time, node in zip(arrive, where, strict=True)], frozenset(
        where
    )

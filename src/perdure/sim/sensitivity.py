"""How the result moves with the failure rate and with the size of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from perdure.core.policies.base import CAUSES
from perdure.schema.cluster import Scenario
from perdure.schema.errors import UsageError
from perdure.sim.experiment import Comparison, Tick, compare
from perdure.sim.studies import rates_of_table

RATES = (0.25, 1.0, 4.0, 16.0)
SIZES = (0.5, 1.0, 2.0, 4.0)
NODES_MAX = 15_000
"""Clusters that would grow beyond so many nodes are left out."""


@dataclass(frozen=True)
class Curve:
    """Goodput of each policy at multiples of something; `note` says why there are no points."""

    title: str
    points: tuple[tuple[float, Comparison], ...]
    note: str = ""


def by_rate(scenario: Scenario, names: Sequence[str], seeds: int, tick: Tick | None = None) -> Curve:
    """Goodput at multiples of the failure rate; not for a recorded trace, whose failures are what they
    are.
    """
    cluster = scenario.cluster
    if cluster.trace is not None:
        cluster = rates_of_table(cluster) or cluster
    if cluster.trace is not None or cluster.mtbf_hours_per_node is None:
        return Curve("Failure rate", (), "The failures are those of a recorded trace, which has one rate.")
    points: list[tuple[float, Comparison]] = []
    for factor in RATES:
        changed = msgspec.structs.replace(cluster, mtbf_hours_per_node=cluster.mtbf_hours_per_node / factor)
        points += _point(factor, msgspec.structs.replace(scenario, cluster=changed), names, seeds, tick)
    return Curve("Failure rate", tuple(points))


def by_size(scenario: Scenario, names: Sequence[str], seeds: int, tick: Tick | None = None) -> Curve:
    """Goodput at multiples of the cluster, jobs and spares growing with it at the same rate per node."""
    cluster = scenario.cluster
    if cluster.trace is not None:
        cluster = rates_of_table(cluster) or cluster
    if cluster.trace is not None:
        return Curve("Cluster size", (), "A recorded trace has as many nodes as it has.")
    points: list[tuple[float, Comparison]] = []
    for factor in SIZES:
        nodes = round(cluster.nodes * factor)
        jobs = tuple(
            msgspec.structs.replace(
                job,
                gpus=msgspec.structs.replace(
                    job.gpus, max=max(job.gpus.min, round(job.gpus.max * factor)), now=0
                ),
            )
            for job in scenario.job
        )
        if nodes > NODES_MAX or any(job.gpus.min > nodes * cluster.gpus_per_node for job in jobs):
            continue
        changed = msgspec.structs.replace(cluster, nodes=nodes, spares=round(cluster.spares * factor))
        bigger = msgspec.structs.replace(scenario, cluster=changed, job=jobs)
        points += _point(factor, bigger, names, seeds, tick)
    return Curve("Cluster size", tuple(points))


def _point(
    factor: float, scenario: Scenario, names: Sequence[str], seeds: int, tick: Tick | None
) -> list[tuple[float, Comparison]]:
    """The comparison at one multiple; none where that is more than is simulated."""
    try:
        return [(factor, compare(scenario, names, seeds, tick))]
    except UsageError:
        return []


def lost_gpu_hours(comparison: Comparison, policy: str) -> float:
    """GPU-hours that were not useful although the GPUs were there."""
    causes = [cause for cause in CAUSES if cause not in ("useful", "down")]
    return sum(comparison.gpu_seconds(policy, cause).mean for cause in causes) / 3600.0

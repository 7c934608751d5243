"""Generated failures have the rate that was asked for and the shape that their process names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from perdure.schema.cluster import (
    Cluster,
    Degradation,
    FailureProcess,
    Hours,
    LateNodes,
    Preemption,
    Severity,
)
from perdure.schema.errors import UsageError
from perdure.sim.generators import draw_hours, generate
from perdure.sim.happenings import Happening, Kind
from perdure.sim.studies import STUDIES

DAYS = 100.0


def cluster(**more: Any) -> Cluster:
    values: dict[str, Any] = {"nodes": 200, "mtbf_hours_per_node": 240.0, **more}
    return Cluster(gpus_per_node=8, gpu="A100-80GB", **values)


def faults(spec: Cluster, seed: int = 1) -> list[Happening]:
    return [event for event in generate(spec, DAYS, seed).happenings if event.kind is Kind.FAULT]


@pytest.mark.parametrize(
    ("process", "slack"),
    [
        (FailureProcess(kind="poisson"), 0.05),
        (FailureProcess(kind="weibull", shape=0.7), 0.06),
        (FailureProcess(kind="weibull", shape=2.0), 0.05),
        (FailureProcess(kind="bursts"), 0.06),
        (FailureProcess(kind="lemons"), 0.05),
        (FailureProcess(kind="infant"), 0.05),
    ],
)
def test_every_process_has_the_rate_that_was_asked_for(process: FailureProcess, slack: float) -> None:
    """200 nodes for 100 days at one fault in 10 days each: 2000 faults, nodes being repaired at once."""
    spec = cluster(failures=process, repair_hours=Hours(fixed=0.0), severity=Severity(sev1=0, sev2=1, sev3=1))
    counts = [len(faults(spec, seed)) for seed in range(5)]
    assert np.mean(counts) == pytest.approx(2000, rel=slack)


def test_severities_and_repairs() -> None:
    spec = cluster(repair_hours=Hours(min=24, max=168))
    found = faults(spec)
    counts = Counter(event.severity for event in found)
    for severity, share in zip((1, 2, 3), spec.severity.shares, strict=True):
        assert counts[severity] / len(found) == pytest.approx(share, abs=0.03)
    repairs = [event.lasts_s / 3600 for event in found if event.severity == 1]
    assert min(repairs) >= 24
    assert max(repairs) <= 168
    assert all(event.lasts_s == 0 for event in found if event.severity != 1)


def gaps(found: list[Happening]) -> np.ndarray:
    """Hours between faults of one node."""
    by_node: dict[int, list[float]] = {}
    for event in found:
        by_node.setdefault(event.node, []).append(event.time_s / 3600)
    return np.concatenate([np.diff(times) for times in by_node.values()])


def test_a_shape_below_one_clusters_the_faults_of_a_node() -> None:
    """The coefficient of variation of Weibull gaps: 1.46 for shape 0.7, 0.52 for shape 2."""
    spread = {}
    for shape in (0.7, 2.0):
        process = FailureProcess(kind="weibull", shape=shape)
        spec = cluster(failures=process, severity=Severity(sev1=0, sev2=1, sev3=1), mtbf_hours_per_node=24.0)
        found = gaps(faults(spec))
        spread[shape] = found.std() / found.mean()
    assert spread[0.7] == pytest.approx(1.46, abs=0.1)
    assert spread[2.0] == pytest.approx(0.52, abs=0.05)


def test_bursts_take_neighbours_at_once() -> None:
    found = faults(cluster(failures=FailureProcess(kind="bursts", burst_share=0.5, burst_nodes=4)))
    by_time: dict[float, list[int]] = {}
    for event in found:
        by_time.setdefault(event.time_s, []).append(event.node)
    bursts = [nodes for nodes in by_time.values() if len(nodes) > 1]
    assert all(sorted(nodes) == list(range(min(nodes), min(nodes) + 4)) for nodes in bursts)
    assert sum(map(len, bursts)) / len(found) == pytest.approx(0.5, abs=0.05)


def test_lemons_fail_more_often() -> None:
    found = faults(cluster(failures=FailureProcess(kind="lemons", lemon_share=0.02, factor=10)))
    ranked = [count for _, count in Counter(event.node for event in found).most_common()]
    lemons, others = np.mean(ranked[:4]), np.mean(ranked[4:])
    assert lemons / others == pytest.approx(10, rel=0.25)


def test_young_nodes_fail_more_often() -> None:
    process = FailureProcess(kind="infant", factor=10, decay_hours=72)
    spec = cluster(failures=process, severity=Severity(sev1=0, sev2=1, sev3=1))
    times = np.array([event.time_s / 3600 for event in faults(spec)])
    early, late = (times < 72).sum() / 72, (times > 1200).sum() / 1200
    # The mean of 1 + 9·e^(−t/72) over the first 72 hours is 1 + 9·(1 − 1/e) = 6.7.
    assert early / late == pytest.approx(6.7, rel=0.2)


def test_one_seed_is_one_trace_and_streams_do_not_disturb_each_other() -> None:
    spec = cluster()
    assert generate(spec, DAYS, 3) == generate(spec, DAYS, 3)
    assert generate(spec, DAYS, 3) != generate(spec, DAYS, 4)
    both = cluster(
        preemption=Preemption(mean_hours_per_node=100.0), degradation=Degradation(mean_hours_per_node=100.0)
    )
    assert faults(both, 3) == faults(spec, 3)


def test_preemptions_with_and_without_notice() -> None:
    spec = cluster(
        mtbf_hours_per_node=1e9,
        preemption=Preemption(mean_hours_per_node=240.0, notice_share=0.5, notice_s=60),
    )
    found = generate(spec, DAYS, 1).happenings
    kinds = Counter(event.kind for event in found)
    assert kinds[Kind.NOTICE] / kinds[Kind.REMOVE] == pytest.approx(0.5, abs=0.05)
    assert kinds[Kind.REMOVE] == kinds[Kind.ADD]
    present = set(range(200))
    for event in found:
        if event.kind is Kind.REMOVE:
            present.remove(event.node)
        elif event.kind is Kind.ADD:
            present.add(event.node)


def test_late_nodes_are_absent_until_they_arrive() -> None:
    trace = generate(cluster(late=LateNodes(nodes=5, arrive_hours=Hours(min=1, max=2))), DAYS, 1)
    assert trace.absent == frozenset(range(195, 200))
    arrivals = [event for event in trace.happenings if event.kind is Kind.ADD]
    assert {event.node for event in arrivals} == trace.absent
    assert all(3600 <= event.time_s <= 7200 for event in arrivals)


@pytest.mark.parametrize(
    ("hours", "mean"),
    [
        (Hours(fixed=3.0), 3.0),
        (Hours(min=1.0, max=5.0), 3.0),
        (Hours(mean=3.0), 3.0),
        (Hours(median=3.0, sigma=0.5), 3.0 * np.exp(0.125)),
    ],
)
def test_times_are_drawn_from_the_distribution_they_name(hours: Hours, mean: float) -> None:
    drawn = draw_hours(hours, 20_000, np.random.default_rng(0))
    assert drawn.mean() / 3600 == pytest.approx(mean, rel=0.03)
    assert hours.mean_hours == pytest.approx(mean)


def test_the_rates_of_the_studies() -> None:
    """Back to what was published: 43 in 56 days on 16 nodes, 106 in 7, 6.5 and 2.34 per 1,000 node-days."""
    assert 56 * 24 * 16 / STUDIES["unicron-a"].mtbf_hours_per_node == pytest.approx(43)
    assert 7 * 24 * 16 / STUDIES["unicron-b"].mtbf_hours_per_node == pytest.approx(106)
    assert 43 * STUDIES["unicron-a"].severity.shares[0] == pytest.approx(10)
    assert 106 * STUDIES["unicron-b"].severity.shares[0] == pytest.approx(26)
    assert 24_000 / STUDIES["meta-rsc1"].mtbf_hours_per_node == pytest.approx(6.5)
    assert 24_000 / STUDIES["meta-rsc2"].mtbf_hours_per_node == pytest.approx(2.34)
    # Meta: the rate alone gives 28.8 h between failures at 1,024 GPUs.
    assert STUDIES["meta-rsc1"].mtbf_hours_per_node / 128 == pytest.approx(28.8, abs=0.1)


def test_a_rate_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mtbf_hours_per_node: 0\.0001 h make .* events in 100 days"):
        faults(cluster(mtbf_hours_per_node=0.0001))

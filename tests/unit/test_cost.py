"""WAF and G by hand, the expected running time, and what a transition costs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from perdure.core.cost import (
    LONGEST_RUN_S,
    SETUP_S,
    expected_running,
    gains,
    node_loss_rate,
    transition_seconds,
)
from perdure.core.curve import job_curve, state_bytes
from perdure.core.gpus import KINDS
from perdure.schema.cluster import Cluster, GpuRange, Hours, Job, Model, Plan, Preemption, Scenario, Severity
from perdure.schema.errors import UsageError
from perdure.schema.measured import Measured

CLUSTER = Cluster(nodes=16, gpus_per_node=8, gpu="A100-80GB", mtbf_hours_per_node=100, severity=Severity())
GPT_7B = Model(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51_200, global_batch=512)


def test_gains_by_hand() -> None:
    waf = np.array([0.0, 0.0, 4.0, 5.0])
    counts = np.arange(5)
    # F·100 everywhere, less F(2)·10 = 40 unless it stays at 2.
    assert gains(waf, 2, counts, 100.0, 10.0).tolist() == [-40, -40, 400, 460, 460]
    assert gains(waf, 2, counts, 100.0, 10.0, failed=True).tolist() == [-40, -40, 360, 460, 460]
    assert gains(waf, 0, counts, 100.0, 10.0).tolist() == [0, 0, 400, 500, 500]
    assert gains(waf, 9, counts, 100.0, 10.0).tolist() == [-50, -50, 350, 450, 450]


def test_the_running_time_falls_with_the_nodes_and_with_the_rate_of_losses() -> None:
    rate = node_loss_rate(CLUSTER)
    assert rate == pytest.approx(0.281 / (100 * 3600))
    running_s = expected_running(rate)
    assert running_s(16) == pytest.approx(100 * 3600 / 0.281 / 16)
    assert running_s(16) == pytest.approx(running_s(8) / 2)
    assert running_s(0) == LONGEST_RUN_S
    assert expected_running(0.0)(10) == LONGEST_RUN_S


def test_only_what_takes_a_node_counts() -> None:
    soft = msgspec.structs.replace(CLUSTER, severity=Severity(sev1=0, sev2=1, sev3=1))
    assert node_loss_rate(soft) == 0
    spot = msgspec.structs.replace(
        soft, preemption=Preemption(mean_hours_per_node=5, absent_hours=Hours(mean=1))
    )
    assert node_loss_rate(spot) == pytest.approx(1 / (5 * 3600))


def test_a_trace_alone_does_not_say_what_planners_believe() -> None:
    traced = msgspec.structs.replace(CLUSTER, mtbf_hours_per_node=None, trace="x.csv")
    with pytest.raises(UsageError, match=r"cluster\.mtbf_hours_per_node: missing"):
        node_loss_rate(traced)


def test_a_transition_is_set_up_and_the_state_s_way_to_a_joiner() -> None:
    job = Job(name="a", gpus=GpuRange(min=8, max=64), model=GPT_7B)
    scenario = Scenario(cluster=CLUSTER, job=(job,))
    curve = job_curve(job, CLUSTER, KINDS["A100-80GB"])
    found = transition_seconds(curve, scenario)
    assert found == pytest.approx(SETUP_S + state_bytes(job) / (8 * 25e9 * 0.8))
    larger = msgspec.structs.replace(job, state_gb=1000.0)
    assert transition_seconds(job_curve(larger, CLUSTER, KINDS["A100-80GB"]), scenario) > found
    told = msgspec.structs.replace(scenario, plan=Plan(transition_s=3.0))
    assert transition_seconds(curve, told) == 3.0


def test_without_a_size_only_the_set_up_is_known() -> None:
    table = Measured(unit="flops_per_s", gpus=(8,), values=(1e15,))
    job = Job(name="a", gpus=GpuRange(min=8, max=8), throughput="x.csv", measured=table)
    curve = job_curve(job, CLUSTER, KINDS["A100-80GB"])
    assert transition_seconds(curve, Scenario(cluster=CLUSTER, job=(job,))) == SETUP_S

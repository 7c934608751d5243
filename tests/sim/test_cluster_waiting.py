"""No job waits for nodes that are free, whatever it was busy with when they came."""

from __future__ import annotations

import math

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.cost import expected_running
from perdure.core.policies import POLICIES, make
from perdure.core.policies.base import Method
from perdure.core.policies.work import Workload
from perdure.sim.cluster import JobSpec, Result, Setup, simulate
from perdure.sim.dealing import Planner
from perdure.sim.happenings import Happening, Kind, Trace

LONG = {
    name: {"node_s": 1800.0} if name in ("unicron", "perdure") else {"connection_s": 1800.0}
    for name in POLICIES
}
QUEUE = ("megatron", "varuna", "oobleck", "bamboo", "recycle")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("back_s", [4200.0, 5399.0, 5400.0, 5401.0, 6000.0])
def test_a_node_that_returns_while_its_loss_is_still_unknown_is_used(policy: str, back_s: float) -> None:
    job = modelled_job(2)
    lost = [Happening(3600.0, Kind.REMOVE, 1), Happening(back_s, Kind.ADD, 1)]
    result = run(policy, [plain_job(2, least=2)], 2, lost, 40_000.0, LONG[policy])
    assert result.gpu_seconds["idle"] <= 1800.0  # the node's own wait for the job, or the job's for the node
    assert result.goodput > 0.6
    modelled = run(policy, [job], 2, lost, 40_000.0, LONG[policy])
    assert modelled.log[-2]["state"] in ("run", "recompute")


def test_a_repair_shorter_than_the_timeout_is_no_worse_than_a_longer_one() -> None:
    def done(repair_s: float) -> float:
        lost = [Happening(3600.0, Kind.FAULT, 0, 1, Method.EXCEPTION, repair_s)]
        return run("megatron", [plain_job(2, least=2)], 2, lost, 40_000.0).waf

    assert done(600.0) == done(1700.0) >= done(1900.0) > done(9000.0)


def queued(
    policy: str, specs: list[JobSpec], nodes: int, spares: int = 0, lost: Trace | None = None
) -> Result:
    works = [spec.work for spec in specs]
    setup = Setup(nodes, spares, 1, 1e9, 40_000.0, tuple(specs))
    planner = Planner(works, [20.0] * len(works), nodes, expected_running(1e-6))
    return simulate(setup, make(policy, {}), lost or Trace(()), planner, keep_log=True)


def big(steps: float) -> JobSpec:
    return JobSpec(plain_job(4, least=4, name="first", weight=10.0), steps=steps)


def second(least: int = 2) -> Workload:
    return plain_job(4, least=least, name="second")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arrive_s", [0.0, 100.0])
def test_a_job_without_a_share_begins_when_another_ends(policy: str, arrive_s: float) -> None:
    """It was given nothing by the first plan, or came when nothing was free; then it gets all there is."""
    result = queued(policy, [big(1000.0), JobSpec(second(), arrive_s)], 4)
    assert result.jobs["first"].steps == pytest.approx(1000)
    assert result.jobs["second"].steps == pytest.approx((40_000 - 10_000) / 10, rel=0.1)
    assert result.jobs["second"].note == ""


@pytest.mark.parametrize("policy", QUEUE)
def test_a_job_without_a_share_does_not_take_spares_nor_nodes_of_others(policy: str) -> None:
    """Two nodes are spare and, for a while, one of the first job's is being repaired."""
    lost = Trace((Happening(5000.0, Kind.FAULT, 0, 1, Method.NODE, 8000.0),))
    result = queued(policy, [big(math.inf), JobSpec(second())], 4, spares=2, lost=lost)
    assert result.jobs["second"].steps == 0
    assert result.jobs["second"].note


def test_what_a_job_begins_with_stays_its_share() -> None:
    """Under a fixed number of GPUs a job that began on two nodes is refilled to two, not to more."""
    small = JobSpec(plain_job(2, least=2, name="first", weight=10.0), steps=1000.0)
    result = queued("megatron", [small, JobSpec(second(), 100.0)], 4)
    held = {line["nodes"] for line in result.log if line["event"] == "job_state" and line["job"] == "second"}
    assert held == {2}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cluster_that_fails_as_a_whole_starts_again(policy: str) -> None:
    """All forty nodes at the same moment, back one after the other."""
    lost = [Happening(9000.0, Kind.FAULT, node, 1, Method.NODE, 900.0 + node) for node in range(40)]
    result = run(policy, [plain_job(40)], 40, lost, 40_000.0)
    assert result.log[-2]["state"] in ("run", "recompute")
    assert result.goodput > 0.5


def test_a_share_that_the_policy_cannot_use_grows_to_what_is_free() -> None:
    """The plan gives both jobs one node of five; Bamboo needs two for a shadow, and three are free."""
    works = [plain_job(1, name="first"), plain_job(4, name="second")]
    setup = Setup(5, 0, 1, 1e9, 40_000.0, tuple(JobSpec(work) for work in works))

    class Miserly(Planner):
        def plan(
            self, holding: dict[str, int], nodes: int, failed: frozenset[str] = frozenset()
        ) -> dict[str, int]:
            return dict.fromkeys(holding, 1)

    planner = Miserly(works, [20.0, 20.0], 5, expected_running(1e-6))
    result = simulate(setup, make("bamboo", {}), Trace(()), planner)
    assert result.jobs["second"].steps > 1000
    assert result.jobs["first"].note == "cannot be laid out on 1 nodes"  # it can use no more than one

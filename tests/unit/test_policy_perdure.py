"""perdure: survivors go on, joins happen in the background, only a dead worker's share is done again."""

from __future__ import annotations

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Leaving, Lost, Method, Slowed, View
from perdure.sim.happenings import Happening, Kind

SETTINGS = {"node_s": 6.0, "regroup_s": 2.0, "start_s": 20.0, "snapshot_s": 0.0, "exception_s": 1.0}


def test_survivors_go_on_at_once_and_a_returning_node_joins_in_the_background() -> None:
    """Four nodes; one is lost at 1006 s (60 % of a step done) and back at 3000 s.

    8 s later three nodes compute at 40/3 s a step, a quarter of 0.6 steps again. The node that is back
    starts its process and receives 10 GB while they compute, and joins without a stall.
    """
    work = plain_job(4)
    away = [Happening(1006.0, Kind.REMOVE, 3), Happening(3000.0, Kind.ADD, 3)]
    result = run("perdure", [work], 4, away, 4000.0, SETTINGS)
    ready_s = 20 + 10e9 / work.node_bytes_s
    assert result.jobs["job"].recomputed_steps == pytest.approx(0.15)
    assert result.gpu_seconds["detection"] == pytest.approx(3 * 6)
    # Three survivors regroup for 2 s; the fourth node is made ready in the background.
    assert result.gpu_seconds["transition"] == pytest.approx(3 * 2 + ready_s)
    joined = 3000 + ready_s
    steps = 100.45 + (joined - 1014) / (40 / 3) + (4000 - joined) / 10
    assert result.jobs["job"].steps == pytest.approx(steps)


def test_a_process_that_died_costs_one_replica_for_a_while_and_no_stall() -> None:
    work = modelled_job(4)
    policy = make("perdure", SETTINGS)
    layout = policy.begin(work, (0, 1, 2, 3))
    decision = policy.decide(work, View(layout, (0, 1, 2, 3), 4), Fault(2, Method.EXCEPTION, (1,), 0.5))
    assert decision is not None
    assert layout is not None
    assert decision.lost is Lost.SHARE
    assert [stage.name for stage in decision.stages] == ["regroup"]
    assert decision.layout is not None
    setting = work.setting(4)
    assert setting is not None
    # Micro-batches of the missing replica go to the others: ceil(B / (d − 1)) instead of ceil(B / d).
    more = -(-96 // ((setting.data - 1) * setting.micro_batch))
    less = -(-96 // (setting.data * setting.micro_batch))
    slower = (more + setting.pipeline - 1) / (less + setting.pipeline - 1)
    assert decision.layout.speed.step_s == pytest.approx(layout.speed.step_s * slower)
    assert decision.later is not None
    assert decision.later.layout.speed.step_s == layout.speed.step_s
    assert decision.later.stages == ()


def test_a_retry_in_place_keeps_every_leaf() -> None:
    errors = [Happening(1005.0, Kind.FAULT, 0, 3, Method.EXCEPTION)]
    result = run("perdure", [plain_job(4)], 4, errors, 2000.0, SETTINGS)
    assert result.jobs["job"].recomputed_steps == 0
    assert result.jobs["job"].steps == pytest.approx((2000 - 3) / 10)


def test_a_notice_interrupts_nobody() -> None:
    """The leaver hands over at a boundary: from then on three nodes work, without detection or loss."""
    noticed = [Happening(1003.0, Kind.NOTICE, 2, lasts_s=120.0), Happening(1123.0, Kind.REMOVE, 2)]
    result = run("perdure", [plain_job(4)], 4, noticed, 2000.0, SETTINGS)
    assert result.jobs["job"].faults == 0
    assert result.gpu_seconds["detection"] == 0
    assert result.gpu_seconds["transition"] == 0
    assert result.jobs["job"].steps == pytest.approx(100.3 + (2000 - 1003) / (40 / 3))


def test_a_standby_of_the_plan_replaces_a_lost_node() -> None:
    """With a spare the job is short of a node only until the spare has its state."""
    work = plain_job(4)
    loss = [Happening(1000.0, Kind.FAULT, 3, 1, Method.NODE, 1e9)]
    result = run("perdure", [work], 4, loss, 2000.0, SETTINGS, spares=1)
    ready_s = 20 + 10e9 / work.node_bytes_s
    begin, end = 1000 + 6 + 2, 1000 + 6 + ready_s
    steps = 100 + (end - begin) / (40 / 3) + (2000 - end) / 10
    assert result.jobs["job"].steps == pytest.approx(steps)


@pytest.mark.parametrize(("factor", "left_out"), [(1.2, False), (1.5, True)])
def test_a_slow_node_is_left_out_where_the_job_is_faster_without(factor: float, left_out: bool) -> None:
    """Of four nodes: without one, 4/3 of the time; with one at `factor`, `factor` times."""
    work = plain_job(4)
    policy = make("perdure")
    view = View(policy.begin(work, (0, 1, 2, 3)), (0, 1, 2, 3), 4)
    decision = policy.decide(work, view, Slowed(2, factor))
    assert (decision is not None) == left_out
    if decision is not None:
        assert decision.release == (2,)


def test_without_a_live_replica_state_comes_from_host_memory_then_from_disk() -> None:
    work = plain_job(1)
    for memory_steps, lost in ((10, Lost.MEMORY), (0, Lost.CHECKPOINT)):
        policy = make("perdure", {"memory_steps": memory_steps})
        layout = policy.begin(work, (0,))
        view = View(layout, (), 1, free=(5,))
        decision = policy.decide(work, view, Fault(1, Method.NODE, (0,), 0.5))
        assert decision is not None
        assert decision.lost is lost
        assert decision.layout is not None


def test_all_nodes_leaving_stops_the_job_with_its_state_saved() -> None:
    work = plain_job(2)
    policy = make("perdure")
    layout = policy.begin(work, (0, 1))
    decision = policy.decide(work, View(layout, (0, 1), 2, give=(0, 1)), Leaving((0, 1), 60.0))
    assert decision is not None
    assert decision.layout is None
    assert decision.save_first


def test_faults_while_others_join_leave_nobody_behind() -> None:
    """Five workers die within seconds of each other, a node joins, errors come in between: all are back in
    the end.
    """
    work = modelled_job(8)
    burst = [Happening(1000.0 + 3 * n, Kind.FAULT, n, 2, Method.EXCEPTION) for n in range(5)]
    burst += [Happening(1007.0, Kind.FAULT, 6, 3, Method.EXCEPTION), Happening(1010.0, Kind.ADD, 7)]
    burst += [Happening(1013.0, Kind.FAULT, 5, 3, Method.EXCEPTION)]
    result = run("perdure", [work], 8, burst, 3000.0, SETTINGS, absent=frozenset({7}))
    last = [line for line in result.log if line["event"] == "job_state"][-1]
    assert last["state"] == "run"
    assert last["nodes"] == 8
    assert last["step_s"] == pytest.approx(work.ideal_step_s(8))
    assert not last["joining"]


def test_when_every_replica_has_lost_a_worker_state_comes_from_memory() -> None:
    work = modelled_job(2)
    policy = make("perdure", SETTINGS)
    layout = policy.begin(work, (0, 1))
    fault = Fault(2, Method.EXCEPTION, (0,), 0.5)
    first = policy.decide(work, View(layout, (0, 1), 2), fault)
    assert first is not None
    assert first.lost is Lost.SHARE
    second = policy.decide(work, View(first.layout, (0, 1), 2), fault)
    assert second is not None
    assert second.lost is Lost.MEMORY

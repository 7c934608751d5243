"""Megatron: a fixed number of GPUs, a timeout, a queue, a set-up, a checkpoint."""

from __future__ import annotations

import pytest

from bench import plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Lost, Method, Offered, View
from perdure.sim.happenings import Happening, Kind

SETTINGS = {"timeout_s": 100.0, "queue_s": 30.0, "setup_s": 50.0, "save_every_s": 600.0, "write_s": 0.0}


def test_without_a_spare_the_job_waits_for_the_repair_and_redoes_everything_since_the_checkpoint() -> None:
    """Two GPUs, steps of 10 s, a checkpoint at 600 s, an error at 1000 s that takes node 1 for 2000 s.

    0–1000 s useful; 100 s until the timeout; then the survivor idles until 3000 s; 50 s of set-up (it does
    not queue: it waited) and 10 s of loading; 400 s are done again; from 3460 to 4000 s new steps.
    """
    loss = Happening(1000.0, Kind.FAULT, 1, 1, Method.EXCEPTION, 2000.0)
    result = run("megatron", [plain_job(2)], 2, [loss], 4000.0, SETTINGS)
    assert result.gpu_seconds == pytest.approx(
        {
            "useful": 2 * 1000 + 2 * 540,
            "healthy_overhead": 0,
            "checkpoint": 0,
            "detection": 100,
            "transition": 2 * 60,
            "recomputed": 2 * 400,
            "degraded": 0,
            "idle": 1900,
            "down": 2000,
        }
    )
    assert result.jobs["job"].steps == pytest.approx(100 + 54)
    assert result.waf == pytest.approx(154 * 8e12)


def test_with_a_spare_it_queues_and_goes_on() -> None:
    loss = Happening(1000.0, Kind.FAULT, 1, 1, Method.EXCEPTION, 1e9)
    result = run("megatron", [plain_job(2)], 2, [loss], 4000.0, SETTINGS, spares=1)
    # 100 s of timeout, 30 of queue, 50 of set-up, 10 of loading: runs again at 1190 s, catches up at 1590 s.
    assert result.gpu_seconds["transition"] == pytest.approx(2 * 90)
    assert result.gpu_seconds["detection"] == pytest.approx(2 * 100)  # the spare was taken at once
    assert result.gpu_seconds["recomputed"] == pytest.approx(2 * 400)
    assert result.gpu_seconds["useful"] == pytest.approx(2 * 1000 + 2 * (4000 - 1590))
    assert result.gpu_seconds["idle"] == pytest.approx(1000)  # the spare before


def test_a_synchronous_checkpoint_waits_for_the_shared_storage() -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "write_s"}
    result = run("megatron", [plain_job(2, name="a"), plain_job(2, name="b")], 4, [], 1000.0, settings)
    # Both jobs save at 600 s: two transfers of 10 GB share 1 GB/s and take 20 s.
    assert result.gpu_seconds["checkpoint"] == pytest.approx(4 * 20)


@pytest.mark.parametrize(("method", "detect_s"), [(Method.NODE, 5.7), (Method.EXCEPTION, 1800.0)])
def test_only_a_lost_connection_is_noticed_before_the_timeout(method: Method, detect_s: float) -> None:
    work = plain_job(2)
    policy = make("megatron")
    layout = policy.begin(work, (0, 1))
    decision = policy.decide(work, View(layout, (0,), 2, free=(7,)), Fault(1, method, (1,), 0.5))
    assert decision is not None
    assert decision.detect_s == detect_s
    assert decision.lost is Lost.CHECKPOINT
    assert decision.take == (7,)
    assert decision.layout is layout
    assert [stage.name for stage in decision.stages] == ["queue", "set-up", "load"]


def test_half_of_the_missing_nodes_is_no_job() -> None:
    work = plain_job(4)
    policy = make("megatron")
    layout = policy.begin(work, (0, 1, 2, 3))
    loss = Fault(1, Method.NODE, (0, 1), 0.0)
    decision = policy.decide(work, View(layout, (2, 3), 4, free=(9,)), loss)
    assert decision is not None
    assert decision.layout is None
    assert decision.take == (9,)
    waiting = View(None, (2, 3, 9), 4)
    assert policy.decide(work, waiting, Offered()) is None
    again = policy.decide(work, View(None, (2, 3, 9), 4, free=(5,)), Offered())
    assert again is not None
    assert again.layout is not None
    assert again.layout.nodes == 4

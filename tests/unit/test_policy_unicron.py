"""Unicron: four detections, three severities, partial results, the nearest state, one plan."""

from __future__ import annotations

from typing import Literal

import pytest

from bench import plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Lost, Method, Offered, Slowed, View
from perdure.core.policies.unicron import Unicron, lost_share
from perdure.sim.happenings import Happening, Kind

SETTINGS = {"retry_s": 5.0, "restart_s": 40.0, "reconfigure_s": 30.0, "node_s": 6.0, "exception_s": 1.0}


@pytest.mark.parametrize(
    ("method", "detect_s"),
    [(Method.NODE, 5.6), (Method.PROCESS, 1.8), (Method.EXCEPTION, 0.3), (Method.STATISTICAL, 30.0)],
)
def test_the_four_detections(method: Method, detect_s: float) -> None:
    """A hang shows after three mean iterations, here of 10 s."""
    policy = make("unicron")
    assert isinstance(policy, Unicron)
    assert policy.detect_s(Fault(2, method, (0,), 0.0), 10.0) == pytest.approx(detect_s)


def test_partial_results_are_kept() -> None:
    """Four replicas, steps of 10 s (40/3 on three), a node lost at 1006 s when 60 % of a step were done.

    Only its own quarter of those is computed again: 0.15 steps. 6 s until it is noticed, 30 s of
    reconfiguration, 10 GB / 3 nodes of state moved.
    """
    work = plain_job(4)
    result = run("unicron", [work], 4, [Happening(1006.0, Kind.REMOVE, 3)], 2000.0, SETTINGS)
    move_s = 10e9 / 3 / work.node_bytes_s
    assert result.jobs["job"].recomputed_steps == pytest.approx(0.25 * 0.6)
    assert result.gpu_seconds["recomputed"] == pytest.approx(3 * 0.15 * 40 / 3)
    assert result.gpu_seconds["detection"] == pytest.approx(3 * 6)
    assert result.gpu_seconds["transition"] == pytest.approx(3 * (30 + move_s))
    resumed = 1006 + 6 + 30 + move_s
    assert result.jobs["job"].steps == pytest.approx(100.45 + (2000 - resumed) / (40 / 3))


def test_once_the_all_reduce_has_begun_nothing_is_computed_again() -> None:
    assert lost_share(0.5, 4, 1, 0.05) == 0.25
    assert lost_share(0.94, 4, 2, 0.05) == 0.5
    assert lost_share(0.96, 4, 1, 0.05) == 0.0


def test_severities() -> None:
    work = plain_job(4)
    policy = make("unicron", SETTINGS)
    layout = policy.begin(work, (0, 1, 2, 3))
    view = View(layout, (0, 1, 2, 3), 4)
    retry = policy.decide(work, view, Fault(3, Method.EXCEPTION, (1,), 0.5))
    assert retry is not None
    assert (retry.lost, [stage.name for stage in retry.stages]) == (Lost.NOTHING, ["retry in place"])
    restart = policy.decide(work, view, Fault(2, Method.PROCESS, (1,), 0.5))
    assert restart is not None
    assert restart.lost is Lost.SHARE
    assert restart.share == 0.25
    assert [stage.name for stage in restart.stages] == ["restart the process"]
    assert restart.layout is layout


@pytest.mark.parametrize(
    ("graded", "cured", "attempts"),
    [
        (3, 3, ["retry in place"]),
        (3, 2, ["retry in place", "restart the process"]),
        (3, 1, ["retry in place", "restart the process"]),
        (2, 1, ["restart the process"]),
    ],
)
def test_an_action_that_fails_escalates(
    graded: Literal[2, 3], cured: Literal[1, 2, 3], attempts: list[str]
) -> None:
    work = plain_job(4)
    policy = make("unicron", SETTINGS)
    layout = policy.begin(work, (0, 1, 2, 3))
    held = (0, 1, 2) if cured == 1 else (0, 1, 2, 3)
    fault = Fault(cured, Method.EXCEPTION, (3,), 0.0, graded=graded)
    decision = policy.decide(work, View(layout, held, 4), fault)
    assert decision is not None
    names = [stage.name for stage in decision.stages]
    assert names == attempts + (["reconfigure", "move state"] if cured == 1 else [])


@pytest.mark.parametrize(
    ("lost", "memory_steps", "source"),
    [((3,), 1, Lost.SHARE), ((0,), 1, Lost.MEMORY), ((0, 1), 1, Lost.CHECKPOINT), ((0,), 0, Lost.CHECKPOINT)],
)
def test_state_comes_from_the_nearest_place(lost: tuple[int, ...], memory_steps: int, source: Lost) -> None:
    """A live replica; with none left the copy in another host's memory, if only one host died; then
    storage.
    """
    work = plain_job(4)
    policy = make("unicron", {**SETTINGS, "memory_steps": memory_steps})
    replicas = 4 if source is Lost.SHARE else len(lost)
    layout = policy.begin(work, tuple(range(replicas)))
    held = tuple(node for node in range(4) if node not in lost)
    decision = policy.decide(work, View(layout, held, 4), Fault(1, Method.NODE, lost, 0.5))
    assert decision is not None
    assert decision.lost is source


def test_a_slow_node_is_reported_and_a_very_slow_one_has_failed() -> None:
    work = plain_job(4)
    policy = make("unicron")
    view = View(policy.begin(work, (0, 1, 2, 3)), (0, 1, 2, 3), 4)
    assert policy.decide(work, view, Slowed(2, 2.0)) is None
    decision = policy.decide(work, view, Slowed(2, 3.5))
    assert decision is not None
    assert decision.release == (2,)
    assert decision.layout is not None
    assert decision.layout.nodes == 3


def test_a_change_of_plan_loses_no_step() -> None:
    work = plain_job(4)
    policy = make("unicron")
    layout = policy.begin(work, (0, 1, 2))
    decision = policy.decide(work, View(layout, (0, 1, 2), 3, free=(7,)), Offered())
    assert decision is not None
    assert decision.lost is Lost.NOTHING
    assert decision.take == (7,)


def test_the_plan_moves_a_node_to_the_job_that_is_worth_more() -> None:
    """Two jobs of two nodes; the heavier one loses a node and gets one of the lighter one's."""
    heavy, light = plain_job(2, name="heavy", weight=2.0), plain_job(2, name="light")
    result = run("unicron", [heavy, light], 4, [Happening(1000.0, Kind.REMOVE, 0)], 5000.0, SETTINGS)
    owners = [line for line in result.log if line["event"] == "job_state" and line["time_s"] > 1100]
    nodes = {line["job"]: line["nodes"] for line in owners}
    assert nodes == {"heavy": 2, "light": 1}

"""Bamboo: shadows, adjacent losses, the rule of reconfiguration, what redundancy costs."""

from __future__ import annotations

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.policies import make
from perdure.core.policies.bamboo import (
    Bamboo,
    BambooLayout,
    Pipeline,
    new_pipeline,
    reconfigures,
    redundant_s,
    take_over,
)
from perdure.core.policies.base import Fault, Lost, Method, Offered, View
from perdure.core.policies.pipeline import Grid
from perdure.core.policies.places import Places
from perdure.sim.happenings import Happening, Kind


def test_the_predecessor_takes_the_lost_stage_over() -> None:
    start = new_pipeline((10, 11, 12, 13))
    assert start == Pipeline(primary=(10, 11, 12, 13), shadow=(13, 10, 11, 12))
    after = take_over(start, frozenset({11}))
    # Node 10 now has stages 0 and 1; stage 1 has no shadow any more, and stage 2's died with node 11.
    assert after == Pipeline(primary=(10, 10, 12, 13), shadow=(13, None, None, 12))


def test_two_adjacent_losses_are_fatal_and_two_others_are_not() -> None:
    start = new_pipeline((10, 11, 12, 13))
    assert take_over(start, frozenset({11, 12})) is None
    assert take_over(start, frozenset({13, 10})) is None  # the last and the first are adjacent too
    assert take_over(start, frozenset({11, 13})) == Pipeline((10, 10, 12, 12), (None, None, None, None))


@pytest.mark.parametrize(("then", "fatal"), [(10, True), (12, True), (13, False)])
def test_after_a_loss_its_neighbours_must_not_die(then: int, fatal: bool) -> None:
    """Node 11's stand-in holds the only copy of stage 1, and stage 2's shadow died with node 11."""
    after = take_over(new_pipeline((10, 11, 12, 13)), frozenset({11}))
    assert after is not None
    assert (take_over(after, frozenset({then})) is None) == fatal


def test_when_it_reconfigures() -> None:
    """Two pipelines of 50 nodes; those that are not intact are named."""
    first, second = new_pipeline(tuple(range(50))), new_pipeline(tuple(range(50, 100)))
    assert reconfigures([], 2, 0, 50) is None
    one, two = take_over(first, frozenset({3})), take_over(second, frozenset({60, 70}))
    assert one is not None
    assert two is not None
    assert reconfigures([one], 2, 0, 50) is None  # 2 of 99 are at risk
    assert reconfigures([one], 2, 1, 50) == "1 nodes wait, 1 are doubled up"
    assert reconfigures([one, two], 2, 0, 50) == "the loss of any of 6 of 97 nodes would be fatal"
    assert reconfigures([], 2, 50, 50) == "a further pipeline can be built"
    trebled = Pipeline((1, 1, 1, 4), (None,) * 4, doubled=1, stages_most=3)
    assert reconfigures([trebled], 1, 0, 4) == "a node holds more than two stages"


def test_intact_pipelines_stay_when_others_are_built_anew() -> None:
    start = BambooLayout((), 3, Places({}), waiting=tuple(range(10))).rebuilt()
    assert [pipeline.primary for pipeline in start.pipelines] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert start.waiting == (9,)
    after = start.without(frozenset({1}))
    assert after is not None
    assert after.broken == (0,)
    again = after.rebuilt()
    assert [pipeline.primary for pipeline in again.pipelines] == [(0, 2, 9), (3, 4, 5), (6, 7, 8)]
    assert again.waiting == ()
    short = again.without(frozenset({2}))
    assert short is not None
    # Two nodes make no pipeline: they wait, and the last pipeline moves up.
    fewer = short.rebuilt()
    assert [pipeline.primary for pipeline in fewer.pipelines] == [(6, 7, 8), (3, 4, 5)]
    assert fewer.waiting == (0, 9)
    assert [fewer.places.get(node) for node in (6, 3, 0, 2)] == [0, 1, None, None]


def test_no_step_is_lost_unless_it_is_fatal() -> None:
    """Two pipelines of two nodes; at 1005 s one node dies: 2 s of detection, then 100 s of reconfiguration.

    Three nodes are left: one pipeline, and one node that waits.
    """
    settings = {
        "connection_s": 2.0,
        "reconfigure_s": 100.0,
        "restart_s": 50.0,
        "snapshot_s": 0.0,
        "depth": {"job": 2},
    }
    result = run("bamboo", [plain_job(4)], 4, [Happening(1005.0, Kind.REMOVE, 1)], 2000.0, settings)
    assert result.jobs["job"].recomputed_steps == 0
    assert result.gpu_seconds["detection"] == pytest.approx(3 * 2)
    assert result.gpu_seconds["transition"] == pytest.approx(3 * 100)
    # One pipeline of two nodes is left, at half the speed; the third node waits.
    assert result.jobs["job"].steps == pytest.approx(100.5 + (2000 - 1107) / 20)
    assert result.gpu_seconds["idle"] == pytest.approx(2000 - 1107)


def test_an_adjacent_loss_goes_back_to_the_checkpoint() -> None:
    settings = {
        "connection_s": 2.0,
        "restart_s": 50.0,
        "snapshot_s": 0.0,
        "save_every_s": 600.0,
        "depth": {"job": 3},
    }
    both = [Happening(1005.0, Kind.REMOVE, 1), Happening(1005.0, Kind.REMOVE, 2)]
    result = run("bamboo", [plain_job(6)], 6, both, 3000.0, settings)
    # From the checkpoint of 600 s: 40.5 steps are done again by the one pipeline that is left, half as fast.
    assert result.jobs["job"].restarts == 1
    assert result.jobs["job"].recomputed_steps == pytest.approx(40.5)
    # The storage takes 10 s: saved position 60; 1005 + 2 + 50 + 10 s of loading.
    assert result.jobs["job"].steps == pytest.approx(60 + (3000 - 1067) / 20)


def test_redundancy_is_free_while_it_fits_the_bubble() -> None:
    def grid(micro_batches: int) -> Grid:
        return Grid(4, 1, 1, 1, micro_batches, 1.0, 0.0, 2.0, 0.0, 0.0)

    # The bubble is (4 − 1)·3 s; a shadow's forward pass takes 1 s for each micro-batch.
    assert redundant_s(grid(9)) == 0
    assert redundant_s(grid(12)) == 3


def test_a_measured_share_rules_instead_of_the_model() -> None:
    work = plain_job(4)
    layout = make("bamboo", {"effective_share": 0.25}).begin(work, (0, 1, 2, 3))
    assert layout is not None
    assert layout.speed.step_s == pytest.approx(40.0)
    assert layout.speed.useful == pytest.approx(0.25)
    assert layout.speed.overhead == pytest.approx(0.75)


def test_replay_grows_with_the_step() -> None:
    """The stand-in has the forward passes; it computes the backward passes of the step so far."""
    work = modelled_job(8)
    policy = make("bamboo", {"depth": {"gpt": 4}})
    assert isinstance(policy, Bamboo)
    layout = policy.begin(work, tuple(range(8)))
    assert layout is not None

    def replay(step_done: float) -> float:
        view = View(layout, tuple(range(1, 8)), 8)
        decision = policy.decide(work, view, Fault(1, Method.NODE, (0,), step_done))
        assert decision is not None
        assert decision.lost is Lost.NOTHING
        return decision.stages[0].seconds

    grid = layout.detail.grid
    assert replay(0.0) == 0
    assert replay(0.5) == pytest.approx(0.5 * grid.micro_batches * (grid.recompute_s + grid.backward_s))


def test_waiting_nodes_are_used_when_they_make_a_pipeline() -> None:
    work = plain_job(4)
    policy = make("bamboo", {"depth": {"job": 2}})
    layout = policy.begin(work, (0, 1, 2))
    assert layout is not None
    assert layout.detail.waiting == (2,)
    decision = policy.decide(work, View(layout, (0, 1, 2), 4, free=(3,)), Offered())
    assert decision is not None
    assert decision.layout is not None
    assert len(decision.layout.detail.pipelines) == 2
    assert "a further pipeline" in decision.reason

"""ReCycle: rerouting to live peers, into bubbles; none left means the checkpoint."""

from __future__ import annotations

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Lost, Method, Offered, View
from perdure.core.policies.pipeline import Grid
from perdure.core.policies.recycle import HOLE, Recycle, laid_out, rerouted_step_s
from perdure.sim.happenings import Happening, Kind


def test_a_hole_and_who_fills_it() -> None:
    slots = laid_out((0, 1, 2, 3, 4, 5), 3)
    after = slots.without(frozenset({4}))
    assert after.nodes == (0, 1, 2, 3, HOLE, 5)
    assert after.peers_least == 1
    assert after.filled((9,)).nodes == (0, 1, 2, 3, 9, 5)
    assert after.filled((9,)).holes == ()
    assert laid_out((0, 1, 2, 3, 7), 2).without(frozenset({1})).nodes == (0, 7, 2, 3)


def test_two_losses_of_one_stage_leave_no_peer_and_two_of_different_stages_do() -> None:
    slots = laid_out((0, 1, 2, 3, 4, 5), 3)
    assert slots.without(frozenset({1, 4})).peers_least == 0
    assert slots.without(frozenset({1, 5})).peers_least == 1


@pytest.mark.parametrize(
    ("peers", "step_s"),
    [
        (4, 21.0),  # (4 + 4 − 1)·3: nothing is lost
        (3, 21.0),  # ceil(16/3) = 6 micro-batches of 3 s and 3 s of fill: the bubble takes them
        (2, 27.0),  # 8·3 + 3
        (1, 51.0),  # 16·3 + 3
    ],
)
def test_bubbles_take_the_rerouted_micro_batches(peers: int, step_s: float) -> None:
    """Four pipelines of four stages, four micro-batches each; forward 1 s, backward 2 s."""
    grid = Grid(4, 4, 1, 1, 4, 1.0, 0.0, 2.0, 0.0, 0.0)
    assert rerouted_step_s(grid, peers) == step_s


def test_without_a_live_peer_it_restarts_from_the_checkpoint() -> None:
    work = modelled_job(6)
    policy = make("recycle")
    assert isinstance(policy, Recycle)
    policy._depths[work.name, 6] = 3  # two pipelines of three stages
    layout = policy.begin(work, (0, 1, 2, 3, 4, 5))
    assert layout is not None
    first = policy.decide(work, View(layout, (0, 1, 2, 3, 5), 6), Fault(1, Method.NODE, (4,), 0.5))
    assert first is not None
    assert first.lost is Lost.STEP
    assert first.layout is not None
    second = policy.decide(work, View(first.layout, (0, 2, 3, 5), 6), Fault(1, Method.NODE, (1,), 0.5))
    assert second is not None
    assert second.lost is Lost.CHECKPOINT
    assert [stage.name for stage in second.stages] == ["restart", "load"]
    # The same loss in another stage finds a peer.
    other = policy.decide(work, View(first.layout, (0, 1, 2, 3), 6), Fault(1, Method.NODE, (5,), 0.5))
    assert other is not None
    assert other.lost is Lost.STEP


def test_a_node_that_comes_back_fills_the_hole() -> None:
    """Two replicas of one node each: on one, a step takes twice as long; the peer's copy takes 10 GB / 20
    GB/s.
    """
    settings = {"connection_s": 0.0, "reroute_s": 5.0, "snapshot_s": 0.0}
    away = [Happening(1005.0, Kind.REMOVE, 1), Happening(2000.0, Kind.ADD, 1)]
    work = plain_job(2)
    result = run("recycle", [work], 2, away, 3000.0, settings)
    copy_s = 10e9 / work.node_bytes_s
    done = 100 + (2000 - 1010) / 20
    assert result.jobs["job"].recomputed_steps == pytest.approx(0.5)
    assert result.jobs["job"].steps == pytest.approx(done + (1000 - 5 - copy_s) / 10)
    assert result.gpu_seconds["degraded"] == 0  # one node cannot do more than half of the work of two


def test_nodes_beyond_the_grid_wait() -> None:
    work = plain_job(4)
    policy = make("recycle")
    layout = policy.begin(work, (0, 1, 2))
    decision = policy.decide(work, View(layout, (0, 1, 2), 4, free=(5,)), Offered())
    assert decision is not None
    assert decision.take == (5,)
    assert decision.layout is not None
    assert decision.layout.nodes == 4

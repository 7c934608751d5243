"""Varuna: the search for a cut, the morph to other workers, what a notice saves."""

from __future__ import annotations

import math

import pytest

from bench import SMALL, modelled_job, plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Leaving, Lost, Method, Offered, View
from perdure.core.policies.varuna import largest_micro_batch, morph
from perdure.core.policies.work import Profile
from perdure.schema.cluster import Model
from perdure.sim.happenings import Happening, Kind

BIG = Model(layers=24, hidden=4096, heads=32, sequence=2048, vocabulary=50_304, global_batch=64)


def profile(model: Model) -> Profile:
    found = modelled_job(8, model=model).profile
    assert found is not None
    return found


@pytest.mark.parametrize("workers", range(3, 17))
def test_the_cut_is_the_best_of_all_divisors(workers: int) -> None:
    """By the published formula, written out once more: only divisors of the cut-points, the rest idles."""
    costs = profile(BIG)
    link = costs.node_bytes_s / costs.machine.gpus_per_node
    times = {}
    for depth in (1, 2, 3, 4, 6, 8, 12, 24):
        if depth > workers:
            continue
        width = workers // depth
        share = math.ceil(64 / width)
        size = largest_micro_batch(costs, depth, share)
        if size == 0:
            continue
        count = math.ceil(share / size)
        layer = costs.layer(1, size)
        stage = 24 / depth * (2 * layer.forward_s + layer.backward_s)
        gradient = 2 * costs.parameters_per_layer * 24 / depth
        reduce_s = 2 * (width - 1) / width * gradient / link
        send = costs.boundary_bytes(size) / link + 1e-6 * costs.machine.kind.inter_us
        times[depth] = (count + depth - 1) * stage + 2 * (depth - 1) * send + reduce_s
    found = morph(costs, workers)
    assert found is not None
    best = min(times, key=times.__getitem__)
    assert (found.pipeline, found.data) == (best, workers // best)
    assert found.step_s == pytest.approx(times[best])
    assert found.idle == workers - found.pipeline * found.data
    assert 24 % found.pipeline == 0


@pytest.mark.parametrize("workers", range(1, 97))
def test_a_step_computes_the_whole_global_batch(workers: int) -> None:
    """Also where the pipelines do not divide it: 96 samples on 65 GPUs are two each, not one."""
    found = morph(profile(SMALL), workers)
    assert found is not None
    assert found.data * found.micro_batches * found.micro_batch >= SMALL.global_batch


def test_a_model_of_one_gpu_is_cut_only_where_memory_asks_for_it() -> None:
    """BIG needs 16 bytes × 5 billion parameters = 83 GB: no micro-batch fits one GPU of 80 GB, one fits
    two.
    """
    costs = profile(BIG)
    assert largest_micro_batch(costs, 1, 64) == 0
    assert largest_micro_batch(costs, 2, 64) > 0
    assert morph(costs, 1) is None
    assert largest_micro_batch(profile(SMALL), 1, 8) == 8


def test_a_loss_cuts_the_job_anew_and_idles_what_does_not_fit() -> None:
    """With 7 of 8 workers no divisor of 24 layers uses all seven."""
    work = modelled_job(8, model=BIG)
    policy = make("varuna")
    before = policy.begin(work, tuple(range(8)))
    assert before is not None
    view = View(before, tuple(range(7)), 8)
    decision = policy.decide(work, view, Fault(1, Method.NODE, (7,), 0.5))
    assert decision is not None
    assert decision.layout is not None
    assert decision.layout.detail != before.detail
    assert decision.layout.speed.gpus == 6
    assert decision.lost is Lost.CHECKPOINT


def test_a_notice_saves_what_a_failure_loses() -> None:
    """Three workers, steps of 10 s (15 on two); at 903 s nothing has been saved yet.

    Either way 40 s of restart and 10 s of loading. A failure, noticed after 5.7 s, loses all 90.3 steps; with
    notice they are saved first and none is.
    """
    settings = {"restart_s": 40.0, "rendezvous_s": 0.0, "save_every_steps": 100, "save_s": 0.0}
    work = plain_job(3)
    sudden = run("varuna", [work], 3, [Happening(903.0, Kind.REMOVE, 2)], 4000.0, settings)
    noticed = [Happening(903.0, Kind.NOTICE, 2, lasts_s=120.0), Happening(1023.0, Kind.REMOVE, 2)]
    warned = run("varuna", [work], 3, noticed, 4000.0, settings)
    assert sudden.jobs["job"].recomputed_steps == pytest.approx(90.3)
    assert sudden.jobs["job"].steps == pytest.approx((4000 - 958.7) / 15)
    assert warned.jobs["job"].recomputed_steps == 0
    assert warned.jobs["job"].steps == pytest.approx(90.3 + (4000 - 953) / 15)


def test_growth_is_a_checkpoint_and_a_restart() -> None:
    work = plain_job(4)
    policy = make("varuna")
    layout = policy.begin(work, (0, 1, 2))
    decision = policy.decide(work, View(layout, (0, 1, 2), 4, free=(8, 9)), Offered())
    assert decision is not None
    assert decision.take == (8,)
    assert decision.save_first
    assert decision.lost is Lost.NOTHING


def test_a_notice_to_all_stops_the_job() -> None:
    work = plain_job(2)
    policy = make("varuna")
    layout = policy.begin(work, (0, 1))
    decision = policy.decide(work, View(layout, (0, 1), 2), Leaving((0, 1), 60.0))
    assert decision is not None
    assert decision.layout is None
    assert decision.save_first

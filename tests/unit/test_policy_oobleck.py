"""Oobleck: templates, instantiation, batch distribution, borrow and merge, and its guarantee."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from bench import modelled_job, plain_job, run
from perdure.core.policies import make
from perdure.core.policies.base import Fault, Lost, Method, Offered, View
from perdure.core.policies.oobleck import Oobleck, fleet
from perdure.core.policies.oobleck_plan import (
    BestRates,
    Pipelines,
    Reconfigured,
    Restart,
    distribute,
    makespan,
    partitions,
    reconfigure,
    regroup,
)
from perdure.core.policies.oobleck_templates import Templates, iteration_s, search
from perdure.sim.happenings import Happening, Kind

# -- templates -----------------------------------------------------------------------------------------------


def every_cut(layers: int, nodes: int, gpus: int, sizes: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """All pipelines as lists of (layers, GPUs) of each stage: every node's GPUs in stages, every cut of
    layers.
    """

    def node_splits(left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for size in sizes:
            if size <= left:
                for rest in node_splits(left - size):
                    yield (size, *rest)

    for splits in itertools.product(list(node_splits(gpus)), repeat=nodes):
        stages = [size for split in splits for size in split]
        for cuts in itertools.combinations(range(1, layers), len(stages) - 1):
            ends = (0, *cuts, layers)
            yield [(ends[i + 1] - ends[i], size) for i, size in enumerate(stages)]


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_template(seed: int) -> None:
    """Against every partition of a few unlike layers over two nodes of two GPUs."""
    rng = random.Random(seed)
    layers, nodes, gpus = 6, rng.choice((1, 2, 3)), 2
    one = [rng.uniform(1, 3) for _ in range(layers)]
    seconds = {1: one, 2: [0.6 * time for time in one]}
    best = float("inf")
    for stages in every_cut(layers, nodes, gpus, (1, 2)):
        first, times = 0, []
        for count, size in stages:
            times.append(sum(seconds[size][first : first + count]))
            first += count
        best = min(best, iteration_s(times))
    found = Templates(seconds, gpus).template(nodes)
    assert found is not None
    assert found.iteration_s == pytest.approx(best)
    assert [stage.node for stage in found.stages] == sorted(stage.node for stage in found.stages)
    assert sum(stage.gpus for stage in found.stages) == nodes * gpus


def test_the_formula_by_hand() -> None:
    """Stages of 1, 3, 2 s: T1 = 6, T2 = (12 − 3 + 1 − 1)·3 = 27, T3 = 3 + 2 = 5."""
    assert iteration_s([1, 3, 2]) == 38


@pytest.mark.parametrize("nodes", range(1, 9))
def test_like_layers_need_no_search(nodes: int) -> None:
    seconds = {1: (1.0,) * 12, 2: (0.6,) * 12, 4: (0.4,) * 12}
    quick = Templates(seconds, 4).template(nodes)
    full = search(tuple(sorted(seconds.items())), 4, nodes)
    assert quick is not None
    assert full is not None
    assert quick.iteration_s == pytest.approx(full.iteration_s)


def test_more_nodes_than_layers_make_no_template() -> None:
    assert Templates({1: (1.0,) * 4}, 1).template(5) is None


# -- instantiation and batches -------------------------------------------------------------------------------


def test_partitions_are_all_multisets() -> None:
    assert set(partitions(6, [2, 3, 4], 1)) == {(4, 2), (3, 3), (2, 2, 2)}
    assert set(partitions(6, [2, 3, 4, 6], 2)) == {(4, 2), (3, 3), (2, 2, 2)}


@pytest.mark.parametrize("seed", range(20))
def test_no_distribution_is_done_earlier(seed: int) -> None:
    rng = random.Random(seed)
    count, batch = rng.randint(1, 4), rng.randint(4, 12)
    fill = [rng.uniform(1, 9) for _ in range(count)]
    slowest = [rng.uniform(0.5, 3) for _ in range(count)]

    def latency(shares: tuple[int, ...]) -> float:
        return max(f + (share - 1) * s for f, s, share in zip(fill, slowest, shares, strict=True))

    options = (s for s in itertools.product(range(1, batch + 1), repeat=count) if sum(s) == batch)
    found = distribute(batch, fill, slowest)
    assert found is not None
    groups = [(1, f, s) for f, s in zip(fill, slowest, strict=True)]
    assert makespan(batch, groups) == pytest.approx(latency(found))
    assert sum(found) == batch
    assert min(found) >= 1
    assert latency(found) == pytest.approx(min(latency(shares) for shares in options))


@pytest.mark.parametrize("seed", range(20))
def test_like_pipelines_are_dealt_with_as_one(seed: int) -> None:
    rng = random.Random(seed)
    groups = [(rng.randint(1, 9), rng.uniform(1, 9), rng.uniform(0.5, 3)) for _ in range(rng.randint(1, 4))]
    fill = [f for count, f, _ in groups for _ in range(count)]
    slowest = [s for count, _, s in groups for _ in range(count)]
    batch = rng.randint(len(fill), 200)
    shares = distribute(batch, fill, slowest)
    assert shares is not None
    longest = max(f + (share - 1) * s for f, s, share in zip(fill, slowest, shares, strict=True))
    assert makespan(batch, groups) == pytest.approx(longest)
    assert makespan(len(fill) - 1, groups) == float("inf")


def test_fewer_micro_batches_than_pipelines_cannot_be_shared() -> None:
    assert distribute(2, [1, 1, 1], [1, 1, 1]) is None


def test_rates_decide_where_multisets_are_too_many() -> None:
    rates = {2: 1.0, 3: 1.9, 5: 2.5}
    table = BestRates(rates, 32)
    for total in range(4, 20):
        options = list(partitions(total, list(rates), 2))
        found = table.members(total, 2)
        if found is not None:
            assert sum(found) == total
            assert len(found) >= 2
            assert sum(rates[size] for size in found) <= max(sum(rates[s] for s in o) for o in options) + 1e-9
    assert table.members(9, 2) == (3, 3, 3)


def test_the_chosen_pipelines_are_the_fastest() -> None:
    work = modelled_job(9, 2)
    policy = make("oobleck", {"nodes_least": {"gpt": 2}})
    assert isinstance(policy, Oobleck)
    chosen = policy.instantiate(work, 9)
    assert chosen is not None
    steps = {option: policy.step_s(work, option) for option in partitions(9, range(2, 8), 2)}
    assert policy.step_s(work, chosen) == min(steps.values())


# -- losses --------------------------------------------------------------------------------------------------


def halves(size: int, index: int) -> range:
    """Twelve layers cut evenly over the nodes of a pipeline."""
    return range(12 * index // size, 12 * (index + 1) // size)


def test_borrow_then_merge() -> None:
    """n0 = 2 on five nodes: a pipeline that falls to one node borrows; the next time there is nobody to
    lend.
    """
    first = reconfigure(((0, 1, 2), (3, 4)), frozenset({3}), 2, halves, 12)
    assert isinstance(first, Reconfigured)
    assert first.pipelines == ((0, 1), (4, 2))
    assert first.steps == ("pipeline 1 borrows node 2 from pipeline 0",)
    # Node 4 had layers 6–11 and gets 0–5; node 2 had 8–11 and gets 6–11; node 1 had 4–7 and gets 6–11.
    assert first.fetches == {
        0: (4, 5),
        1: (8, 9, 10, 11),
        4: (0, 1, 2, 3, 4, 5),
        2: (6, 7),
    }
    second = reconfigure(first.pipelines, frozenset({2}), 2, halves, 12)
    assert isinstance(second, Reconfigured)
    assert second.pipelines == ((0, 1, 4),)
    assert second.steps == ("3 nodes of short pipelines are merged into 1",)


def test_a_pipeline_with_enough_nodes_goes_on_with_a_smaller_template() -> None:
    found = reconfigure(((0, 1, 2), (3, 4, 5)), frozenset({1}), 2, halves, 12)
    assert isinstance(found, Reconfigured)
    assert found.pipelines == ((0, 2), (3, 4, 5))
    assert found.fetches == {0: (4, 5), 2: (6, 7)}


def test_short_pipelines_are_merged_into_as_many_as_they_make() -> None:
    """Three that fell below n0 = 3 have six nodes: two pipelines, so that f = 2 still holds with nine
    nodes.
    """
    after, _ = regroup(((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)), frozenset({0, 3, 6}), 3)
    assert sorted(map(len, after)) == [3, 3, 3]


def test_a_layer_without_a_holder_needs_the_checkpoint() -> None:
    found = reconfigure(((0, 1), (2, 3)), frozenset({0, 2}), 1, halves, 12)
    assert found == Restart("layer 0 has no live holder", True)
    found = reconfigure(((0, 1), (2, 3)), frozenset({0, 3}), 2, halves, 12)
    assert isinstance(found, Reconfigured)
    assert found.pipelines == ((1, 2),)


def test_fewer_than_n0_nodes_cannot_go_on() -> None:
    found = reconfigure(((0, 1),), frozenset({0}), 2, halves, 12)
    assert isinstance(found, Restart)
    assert not found.enough_nodes


def random_case(rng: random.Random) -> tuple[Pipelines, int, int]:
    """Pipelines of n0 nodes or more, n0, and a fault tolerance f that their number allows."""
    least = rng.randint(1, 4)
    tolerates = rng.randint(1, 3)
    sizes = [rng.randint(least, least + 3) for _ in range(tolerates + 1 + rng.randint(0, 3))]
    names = rng.sample(range(1000), sum(sizes))
    pipelines, start = [], 0
    for size in sizes:
        pipelines.append(tuple(names[start : start + size]))
        start += size
    return tuple(pipelines), least, tolerates


def uneven(rng: random.Random) -> Callable[[int, int], range]:
    """Templates that cut twelve layers at random, one cut for each size."""
    cuts: dict[int, list[int]] = {}

    def layers_of(size: int, index: int) -> range:
        if size not in cuts:
            cuts[size] = [0, *sorted(rng.sample(range(1, 12), size - 1)), 12]
        return range(cuts[size][index], cuts[size][index + 1])

    return layers_of


def test_f_losses_never_restart_a_job_of_f_plus_1_times_n0_nodes() -> None:
    """10,000 random cases, losses one after the other: the guarantee holds whatever came before."""
    rng = random.Random(7)
    checked = 0
    while checked < 10_000:
        pipelines, least, tolerates = random_case(rng)
        layers_of = uneven(rng)
        while sum(map(len, pipelines)) >= (tolerates + 1) * least and checked < 10_000:
            nodes = [node for pipeline in pipelines for node in pipeline]
            if max(map(len, pipelines)) > 12:
                break
            lost = frozenset(rng.sample(nodes, tolerates))
            found = reconfigure(pipelines, lost, least, layers_of, 12, tolerates + 1)
            assert isinstance(found, Reconfigured), (pipelines, least, tolerates)
            pipelines = found.pipelines
            assert min(map(len, pipelines)) >= least
            checked += 1


def test_otherwise_a_restart_exactly_when_a_layer_or_n0_nodes_are_gone() -> None:
    rng = random.Random(8)
    restarts = 0
    for _ in range(5000):
        pipelines, least, _ = random_case(rng)
        layers_of = uneven(rng)
        nodes = [node for pipeline in pipelines for node in pipeline]
        lost = frozenset(rng.sample(nodes, rng.randint(1, len(nodes))))
        held = {
            layer
            for pipeline in pipelines
            for index, node in enumerate(pipeline)
            if node not in lost
            for layer in layers_of(len(pipeline), index)
        }
        impossible = len(nodes) - len(lost) < least or held != set(range(12))
        found = reconfigure(pipelines, lost, least, layers_of, 12)
        assert isinstance(found, Restart) == impossible
        restarts += impossible
        if isinstance(found, Reconfigured):
            kept = sorted(node for pipeline in found.pipelines for node in pipeline)
            assert kept == sorted(set(nodes) - lost)
            assert all(len(pipeline) >= least for pipeline in found.pipelines)
    assert 500 < restarts < 4500


# -- as a policy ---------------------------------------------------------------------------------------------


def test_the_interrupted_step_alone_is_lost() -> None:
    """Four nodes, steps of 10 s (13.3 on three); at 1005 s half a step is lost, 2 s of reconfiguration."""
    settings = {"connection_s": 0.0, "reconfigure_s": 2.0, "snapshot_s": 0.0}
    result = run("oobleck", [plain_job(4)], 4, [Happening(1005.0, Kind.REMOVE, 3)], 2000.0, settings)
    assert result.jobs["job"].recomputed_steps == pytest.approx(0.5)
    assert result.gpu_seconds["transition"] == pytest.approx(3 * 2)
    assert result.gpu_seconds["recomputed"] == pytest.approx(3 * 0.5 * 40 / 3)
    assert result.jobs["job"].steps == pytest.approx(100 + (2000 - 1007) / (40 / 3))


def test_an_error_takes_the_node_out_until_its_process_is_back() -> None:
    work = plain_job(4)
    policy = make("oobleck", {"rejoin_s": 60.0})
    layout = policy.begin(work, (0, 1, 2, 3))
    fault = Fault(2, Method.PROCESS, (2,), 0.25)
    decision = policy.decide(work, View(layout, (0, 1, 2, 3), 4), fault)
    assert decision is not None
    assert decision.returning == ((2, 60.0),)
    assert decision.layout is not None
    assert decision.layout.nodes == 3
    assert decision.lost is Lost.STEP


def test_a_node_that_comes_back_is_taken_at_a_boundary() -> None:
    work = modelled_job(6, 2)
    policy = make("oobleck")
    layout = policy.begin(work, (0, 1, 2, 3))
    decision = policy.decide(work, View(layout, (0, 1, 2, 3), 6, free=(8, 9)), Offered())
    assert decision is not None
    assert decision.lost is Lost.NOTHING
    assert decision.take == (8, 9)
    assert decision.layout is not None
    assert sorted(node for pipeline in decision.layout.detail.pipelines for node in pipeline) == [
        0,
        1,
        2,
        3,
        8,
        9,
    ]


def test_in_a_large_fleet_only_what_matters_is_looked_at() -> None:
    """The same outcome as with all pipelines in view: sizes, no short pipeline, nobody lost or doubled."""
    rng = random.Random(3)
    pipelines, names = [], list(range(2000))
    while len(pipelines) < 120:
        size = rng.choice((2, 2, 3, 5))
        pipelines.append(tuple(names[:size]))
        del names[:size]
    now = fleet(pipelines)
    for _ in range(200):
        lost = frozenset(
            rng.sample([node for pipeline in now.pipelines for node in pipeline], rng.randint(1, 3))
        )
        whole = reconfigure(now.pipelines, lost, 2, halves, 12, 2)
        gaps = now.touched(lost, 2)
        part = reconfigure(tuple(now.pipelines[i] for i in gaps), lost, 2, halves, 12)
        if len(now.pipelines) <= 40:
            break
        assert isinstance(whole, Reconfigured)
        assert isinstance(part, Reconfigured)
        after = now.replaced(gaps, part.pipelines)
        assert sorted(map(len, after.pipelines)) == sorted(map(len, whole.pipelines))
        kept = sorted(node for pipeline in after.pipelines for node in pipeline)
        assert kept == sorted(node for pipeline in now.pipelines for node in pipeline if node not in lost)
        assert all(after.places.get(n) == i for i, pipeline in enumerate(after.pipelines) for n in pipeline)
        assert after.sizes == fleet(after.pipelines).sizes
        now = after


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("of_each", [1, 2])
def test_a_large_fleet_whose_every_pipeline_is_hit(size: int, of_each: int) -> None:
    """No pipeline is left to stand for the others: all are looked at."""
    pipelines = tuple(tuple(range(first, first + size)) for first in range(0, 40 * size, size))
    lost = frozenset(node for pipeline in pipelines for node in pipeline[:of_each])
    assert fleet(pipelines).touched(lost, size) == tuple(range(40))
    work = plain_job(40 * size)
    policy = make("oobleck", {"nodes_least": {"job": size}})
    layout = policy.begin(work, range(40 * size))
    assert layout is not None
    held = tuple(node for node in range(40 * size) if node not in lost)
    fault = Fault(1, Method.NODE, tuple(sorted(lost)), 0.5)
    decision = policy.decide(work, View(layout, held, 40 * size), fault)
    assert decision is not None
    if held:
        assert decision.layout is not None
        assert decision.layout.nodes == len(held)
    else:
        assert decision.layout is None
        assert decision.lost is Lost.CHECKPOINT

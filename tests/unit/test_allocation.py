"""The allocation against brute force, its look-ups against plans made from nothing, and its calm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from perdure.core.allocation import Allocator, Demand, Outlook, allocate

RunningTime = Callable[[int], float]


def worth(
    demands: Sequence[Demand], taken: Sequence[int], running_s: float, failed: str | None = None
) -> float:
    """Σ G, straight from the formula, in Python's own numbers."""
    total = 0.0
    for demand, nodes in zip(demands, taken, strict=True):
        total += demand.at(nodes) * running_s
        if nodes != demand.current or demand.name == failed:
            total -= demand.at(demand.current) * demand.transition_s
    return total


def best_by_trying_all(
    demands: Sequence[Demand], nodes: int, running_s: float, failed: str | None = None
) -> float:
    everything = itertools.product(range(nodes + 1), repeat=len(demands))
    return max(worth(demands, taken, running_s, failed) for taken in everything if sum(taken) <= nodes)


def hyperbola(mtbf_s: float) -> RunningTime:
    return lambda nodes: mtbf_s / max(nodes, 1)


def random_demands(rng: np.random.Generator, nodes: int) -> list[Demand]:
    """Jobs with plateaus, dips, minima, steps, and allocations that are rarely the best."""
    free, demands = nodes, []
    for job in range(int(rng.integers(1, 4))):
        size = int(rng.integers(1, nodes + 2))
        waf = np.concatenate(([0.0], rng.integers(0, 6, size).astype(float).cumsum() / 3))
        if rng.random() < 0.5:
            waf[1:] = np.maximum(0.0, waf[1:] + rng.integers(-3, 2, size))
        waf[: int(rng.integers(0, min(4, size + 1)))] = 0.0
        step = int(rng.integers(1, 3))
        waf = waf[(np.arange(waf.size) // step) * step]
        current = int(rng.integers(0, free + 1)) if rng.random() < 0.7 else 0
        free -= current
        demands.append(
            Demand(f"job{job}", waf * rng.choice([0.5, 1.0, 2.0]), current, float(rng.integers(0, 40)))
        )
    return demands


def check(
    demands: Sequence[Demand], nodes: int, plan_nodes: dict[str, int], value: float, best: float
) -> None:
    assert sum(plan_nodes.values()) <= nodes
    assert value == pytest.approx(best, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("block", range(4))
def test_the_plan_is_the_best_there_is(block: int) -> None:
    rng = np.random.default_rng(block)
    for _ in range(500):
        nodes = int(rng.integers(1, 8))
        demands, running_s = random_demands(rng, nodes), hyperbola(float(rng.integers(20, 400)))
        plan = allocate(demands, nodes, running_s)
        best = best_by_trying_all(demands, nodes, running_s(nodes))
        check(demands, nodes, plan.nodes, plan.value, best)
        assert worth(demands, list(plan.nodes.values()), running_s(nodes)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("block", range(4))
def test_every_event_computed_ahead_is_the_best_answer_to_it(block: int) -> None:
    rng = np.random.default_rng(100 + block)
    for _ in range(120):
        nodes = int(rng.integers(1, 7))
        demands, running_s = random_demands(rng, nodes), hyperbola(float(rng.integers(20, 400)))
        outlook = Outlook(demands, nodes, running_s)
        names: list[str | None] = [demand.name for demand in demands if demand.current]
        if sum(demand.current for demand in demands) < nodes:
            names.append(None)
        for name in names:
            plan = outlook.lose(name)
            best = best_by_trying_all(demands, nodes - 1, running_s(nodes - 1), failed=name)
            check(demands, nodes - 1, plan.nodes, plan.value, best)
            taken = [plan.nodes[demand.name] for demand in demands]
            assert worth(demands, taken, running_s(nodes - 1), name) == pytest.approx(best, abs=1e-9)
        plan = outlook.gain()
        best = best_by_trying_all(demands, nodes + 1, running_s(nodes + 1))
        check(demands, nodes + 1, plan.nodes, plan.value, best)
        for job, gone in enumerate(demands):
            rest = demands[:job] + demands[job + 1 :]
            plan = outlook.finish(gone.name)
            assert set(plan.nodes) == {demand.name for demand in rest}
            check(rest, nodes, plan.nodes, plan.value, best_by_trying_all(rest, nodes, running_s(nodes)))
        new = Demand("new", random_demands(rng, nodes)[0].waf)
        plan = outlook.submit(new)
        everyone = [*demands, new]
        check(everyone, nodes, plan.nodes, plan.value, best_by_trying_all(everyone, nodes, running_s(nodes)))


def test_a_plan_that_gains_less_than_it_costs_is_not_made() -> None:
    running_s, gain = 100.0, 1.0
    for transition_s, moved in ((4.9, True), (5.0, False), (5.1, False)):
        # b would gain 1 FLOP/s with a's node; stopping b (10 FLOP/s) and a (10) costs 20 · transition.
        a = Demand("a", np.array([0.0, 10.0, 10.0 + gain]), 2, transition_s)
        b = Demand("b", np.array([0.0, 10.0, 10.0 + 2 * gain]), 1, transition_s)
        plan = allocate([a, b], 3, lambda nodes: running_s)
        loss = (a.at(2) + b.at(1)) * transition_s
        assert (plan.nodes == {"a": 1, "b": 2}) == (gain * running_s > loss) == (moved and transition_s < 4.8)
    a = Demand("a", np.array([0.0, 10.0, 11.0]), 2, 4.0)
    b = Demand("b", np.array([0.0, 10.0, 12.0]), 1, 4.0)
    assert allocate([a, b], 3, lambda nodes: 100.0).nodes == {"a": 1, "b": 2}


def test_equal_plans_change_nothing() -> None:
    rng = np.random.default_rng(7)
    for _ in range(500):
        nodes = int(rng.integers(2, 9))
        demands, running_s = random_demands(rng, nodes), hyperbola(200.0)
        taken = [demand.current for demand in demands]
        best = best_by_trying_all(demands, nodes, running_s(nodes))
        if worth(demands, taken, running_s(nodes)) >= best - 1e-9:
            assert list(allocate(demands, nodes, running_s).nodes.values()) == taken
            assert list(Outlook(demands, nodes, running_s).stay().nodes.values()) == taken


def test_where_a_change_costs_more_than_it_can_gain_only_the_job_that_was_hit_changes() -> None:
    rng = np.random.default_rng(11)
    running_s = hyperbola(2000.0)  # 125 s on 16 nodes
    for _ in range(30):
        curves = [np.concatenate(([0.0], rng.uniform(0.5, 1.0, 9).cumsum())) for _ in range(4)]
        plan = allocate([Demand(f"job{i}", curve) for i, curve in enumerate(curves)], 16, running_s)
        nodes = 16
        for turn in range(20):
            held = [Demand(f"job{i}", curve, plan.nodes[f"job{i}"], 5000.0) for i, curve in enumerate(curves)]
            outlook, hit = Outlook(held, nodes, running_s), rng.choice([d.name for d in held if d.current])
            plan = outlook.gain() if turn % 2 else outlook.lose(hit)
            nodes += 1 if turn % 2 else -1
            for demand in held:
                if demand.current and (turn % 2 or demand.name != hit):
                    assert plan.nodes[demand.name] == demand.current


def test_whatever_changes_pays_for_itself() -> None:
    rng = np.random.default_rng(12)
    for _ in range(200):
        nodes = int(rng.integers(2, 9))
        demands, running_s = random_demands(rng, nodes), hyperbola(300.0)
        outlook = Outlook(demands, nodes, running_s)
        calm = [demand.current for demand in demands]
        for plan, alive in ((outlook.stay(), nodes), (outlook.gain(), nodes + 1)):
            found = [plan.nodes[demand.name] for demand in demands]
            gain = worth(demands, found, running_s(alive)) - worth(demands, calm, running_s(alive))
            assert found == calm or gain > 0


def test_surplus_nodes_stay_idle() -> None:
    plateau = Demand("a", np.array([0.0, 1.0, 1.0, 1.0]))
    assert allocate([plateau], 3, hyperbola(10.0)).nodes == {"a": 1}


def test_a_minimum_is_all_or_nothing() -> None:
    waf = np.array([0.0, 0.0, 0.0, 9.0])
    assert allocate([Demand("a", waf)], 2, hyperbola(10.0)).nodes == {"a": 0}
    assert allocate([Demand("a", waf)], 3, hyperbola(10.0)).nodes == {"a": 3}


def test_no_nodes_no_jobs() -> None:
    assert allocate([], 5, hyperbola(1.0)).nodes == {}
    assert allocate([Demand("a", np.array([0.0, 1.0]))], 0, hyperbola(1.0)).nodes == {"a": 0}
    outlook = Outlook([Demand("a", np.array([0.0, 1.0]))], 0, hyperbola(1.0))
    assert outlook.gain().nodes == {"a": 1}


@pytest.mark.parametrize(
    ("waf", "current", "transition_s"),
    [
        ([1.0, 2.0], 0, 0.0),
        ([0.0, -1.0], 0, 0.0),
        ([0.0, np.nan], 0, 0.0),
        ([0.0], -1, 0.0),
        ([0.0], 0, np.inf),
    ],
)
def test_impossible_demands_are_refused(waf: list[float], current: int, transition_s: float) -> None:
    with pytest.raises(ValueError, match="a: "):
        Demand("a", np.array(waf), current, transition_s)


def test_more_held_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="hold 3 nodes of 2"):
        Outlook([Demand("a", np.array([0.0, 1.0]), current=3)], 2, hyperbola(1.0))


def test_sums_on_the_grid_are_exact() -> None:
    rng = np.random.default_rng(3)
    demands = [Demand(f"{i}", np.concatenate(([0.0], rng.uniform(0, 1e17, 30).cumsum()))) for i in range(50)]
    allocator = Allocator(demands, hyperbola(3e7), 100)
    chosen = np.array([rng.choice(allocator.options(job, 100).gains) for job in range(50)])
    assert (
        float(chosen.cumsum()[-1]) == float(chosen[::-1].cumsum()[-1]) == float(np.sort(chosen).cumsum()[-1])
    )

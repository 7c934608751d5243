"""What `explain` says is true: at the weights it names the plan changes, just before them it does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from perdure.core.allocation import Demand, Outlook, allocate
from perdure.core.explain import alternatives, explain, weight_for_fewer, weight_for_more


def running_s(nodes: int) -> float:
    return 3000.0 / max(nodes, 1)


def settled(rng: np.random.Generator, nodes: int) -> list[Demand]:
    """Random jobs under the best plan for them."""
    demands = []
    for job in range(3):
        waf = np.concatenate(([0.0], rng.uniform(0.2, 1.0, 7).cumsum())) * 1e15
        waf[: int(rng.integers(0, 4))] = 0.0
        demands.append(Demand(f"job{job}", waf, 0, 20.0))
    plan = allocate(demands, nodes, running_s)
    return [dataclasses.replace(demand, current=plan.nodes[demand.name]) for demand in demands]


def with_weight(demands: list[Demand], job: int, factor: float) -> list[Demand]:
    changed = dataclasses.replace(demands[job], waf=demands[job].waf * factor)
    return [*demands[:job], changed, *demands[job + 1 :]]


@pytest.mark.parametrize("seed", range(20))
def test_the_weights_are_the_ones_at_which_the_plan_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(4, 12))
    demands = settled(rng, nodes)
    outlook = Outlook(demands, nodes, running_s)
    for job, demand in enumerate(demands):
        found = alternatives(outlook, job)
        here = int(np.searchsorted(found.nodes, demand.current))
        assert found.total.max() == found.total[here]
        for change, beyond, more in (
            (weight_for_more(found, here), 1 + 1e-6, True),
            (weight_for_fewer(found, here), 1 - 1e-6, False),
        ):
            if change is None:
                continue
            factor, target = change
            after = allocate(with_weight(demands, job, factor * beyond), nodes, running_s).nodes[demand.name]
            before = allocate(with_weight(demands, job, factor / beyond), nodes, running_s).nodes[demand.name]
            assert after == target
            assert (after > demand.current) == more
            assert before == demand.current


def test_the_words() -> None:
    rising, flat = np.array([0.0, 3e15, 5e15, 6e15]), np.array([0.0, 0.0, 0.0, 1e15])
    demands = [Demand("a", rising, 3, 1.0), Demand("b", rising / 2, 1, 1.0), Demand("c", flat, 0, 1.0)]
    outlook = Outlook(demands, 4, running_s)
    assert explain(outlook, 0).startswith("has 3 nodes, the most it can use; its weight × ")
    assert explain(outlook, 1).startswith("has 1 node; with 2: itself +99")
    assert explain(outlook, 2).startswith("waits: it needs at least 3 nodes, worth more to the others")
    alone = Outlook([Demand("a", rising, 3, 1.0)], 3, running_s)
    assert explain(alone, 0).startswith("has 3 nodes, all that are alive")
    pairs = np.array([0.0, 0.0, 1e15, 1e15, 2e15])
    odd = Outlook([Demand("a", pairs, 2, 1.0)], 3, running_s)
    assert explain(odd, 0).startswith("has 2 nodes, the most it can use of the 3 nodes that are alive")
    small = Outlook([Demand("c", flat, 0, 1.0)], 2, running_s)
    assert explain(small, 0) == "waits: it cannot run on the 2 nodes that are alive"


def test_a_job_that_a_move_would_cost_too_much_is_said_to_keep_its_nodes() -> None:
    a = Demand("a", np.array([0.0, 10.0, 11.0]) * 1e15, 2, 300.0)
    b = Demand("b", np.array([0.0, 10.0, 12.0]) * 1e15, 1, 300.0)
    text = explain(Outlook([a, b], 3, running_s), 0)
    assert text.startswith("has 2 nodes, the most it can use")
    idle = Outlook([Demand("a", np.array([0.0, 10.0, 11.0]) * 1e15, 1, 300.0)], 2, running_s)
    assert explain(idle, 0).startswith("keeps its 1 node: 2 would be better, but not by the 300 s")

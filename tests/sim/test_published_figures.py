"""Figures that the simulator has to reach, in little: fewer seeds and shorter runs than
benchmarks/reproduction.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from perdure.core.policies import POLICIES
from perdure.schema.cluster import load_scenario
from perdure.sim.experiment import compare

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "examples" / "scenarios"
sys.path.insert(0, str(ROOT / "benchmarks"))

from published.meta import RSC1, Trial  # noqa: E402
from published.oobleck import shares  # noqa: E402
from published.unicron import SPARES, crossing  # noqa: E402

TRACES = ROOT.parent / "shared" / "traces"


def ratio(scenario: str, seeds: int, **changes: object) -> float:
    """Unicron's accumulated WAF over Megatron's."""
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    found = compare(load_scenario(SCENARIOS / f"{scenario}.toml", overrides), ("unicron", "megatron"), seeds)
    value = found.ratio("unicron", "megatron")
    assert value is not None
    return value


def test_unicron_over_megatron_on_trace_a() -> None:
    assert 1.02 <= ratio("unicron-a", 6) <= 1.38


def test_unicron_over_megatron_on_trace_b_grows_with_repairs_and_crosses_the_published_figure() -> None:
    ratios = [ratio("unicron-b", 6, cluster__repair_hours=hours) for hours in (1, 12, 48)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 1.9 < ratios[2]


def test_spares_keep_trace_b_below_the_published_figure() -> None:
    """The page says so beside its headline."""
    spares = {key.replace(".", "__"): value for key, value in SPARES.items()}
    assert ratio("unicron-b", 4, cluster__repair_hours=48, **spares) < 1.9


def test_where_a_curve_crosses_is_said_in_words() -> None:
    assert crossing((1, 3, 5), (1.0, 1.8, 2.0)) == "at repairs of 4 h"
    assert crossing((1, 3), (1.9, 2.0)) == "below repairs of 1 h"
    assert crossing((1, 3), (1.0, 1.8)) == "never up to 3 h"


@pytest.mark.parametrize("gpus", [1024, 16_384])
def test_effective_training_time_is_metas_formula(gpus: int) -> None:
    trial = Trial(gpus, RSC1, 600, 300)
    simulated = trial.simulated(trial.best_s, 4, failures=300)
    assert sum(simulated) / 4 == pytest.approx(trial.formula(trial.best_s), abs=0.02)


def test_the_best_interval_is_metas() -> None:
    """Within 0.3 point of the best of its multiples, on the same traces."""
    trial = Trial(8192, RSC1, 300, 60)
    goodput = {
        factor: sum(trial.simulated(factor * trial.best_s, 3, failures=500)) / 3
        for factor in (0.5, 0.75, 1.0, 1.33, 2.0)
    }
    assert max(goodput.values()) - goodput[1.0] <= 0.003
    assert goodput[0.5] < goodput[1.0] > goodput[2.0]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the checkout")
@pytest.mark.parametrize(("policy", "published"), [("oobleck", 0.96), ("varuna", 0.54)])
def test_oobleck_published_sample(policy: str, published: float) -> None:
    assert shares(policy)["useful"] == pytest.approx(published, abs=0.04)


def test_eight_weeks_of_seven_policies_take_seconds() -> None:
    """CPU time, plans and templates made on the way."""
    scenario = load_scenario(SCENARIOS / "unicron-a.toml")
    before = time.process_time()
    compare(scenario, tuple(POLICIES), 1)
    assert time.process_time() - before <= 10


def test_a_hundred_thousand_gpus_take_seconds() -> None:
    scenario = load_scenario(SCENARIOS / "hundred-thousand.toml")
    before = time.process_time()
    found = compare(scenario, ("perdure",), 1)
    assert time.process_time() - before <= 15
    assert found.runs["perdure"][0].gpus == 100_000

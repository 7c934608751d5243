"""Many runs: policies × seeds on the same traces, their means with confidence intervals, sweeps over a
key.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.core.policies.base import CAUSES
from perdure.schema.cluster import Scenario, load_scenario
from perdure.sim.cluster import Result
from perdure.sim.scenario import Case, prepare

Tick = Callable[[str], None]
"""Called after each run with what was run."""

_T95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12]
_T95 += [2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04]
"""Student's t at 97.5 % for 1, 2, … 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and the half-width of its 95 % confidence interval; 0 for a single sample, which has none."""

    mean: float
    ci95: float

    def as_json(self) -> dict[str, float]:
        return {"mean": self.mean, "ci95": self.ci95}


def mean_of(samples: Sequence[float]) -> Mean:
    """Mean and 95 % interval by Student's t."""
    count = len(samples)
    if count < 2:
        return Mean(samples[0] if samples else math.nan, 0.0)
    quantile = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return Mean(statistics.fmean(samples), quantile * statistics.stdev(samples) / math.sqrt(count))


@dataclass(frozen=True)
class Comparison:
    """Runs of several policies over the same traces: `runs[policy][i]` is that of seed number i.

    `recorded`: the trace is the same for every seed. There is then one seed, and no interval.
    """

    scenario: Scenario
    seeds: tuple[int, ...]
    runs: Mapping[str, tuple[Result, ...]]
    recorded: bool = False

    def waf(self, policy: str) -> Mean:
        """Accumulated WAF: Σ weight × FLOP of steps, those done twice counted once."""
        return mean_of([run.waf for run in self.runs[policy]])

    def goodput(self, policy: str) -> Mean:
        """Useful GPU-time of all GPU-time."""
        return mean_of([run.goodput for run in self.runs[policy]])

    def gpu_seconds(self, policy: str, cause: str) -> Mean:
        return mean_of([run.gpu_seconds[cause] for run in self.runs[policy]])

    def ratio(self, one: str, other: str) -> float | None:
        """Accumulated WAF of `one` over that of `other`, means over seeds; None if the other got nothing
        done.
        """
        below = self.waf(other).mean
        return self.waf(one).mean / below if below > 0 else None

    def ratio_ci95(self, one: str, other: str) -> float | None:
        """Half-width of the 95 % interval of the ratio, over seeds (each pair saw the same trace)."""
        pairs = list(zip(self.runs[one], self.runs[other], strict=True))
        if any(b.waf <= 0 for _, b in pairs):
            return None
        return mean_of([a.waf / b.waf for a, b in pairs]).ci95

    def series(self, policy: str) -> list[tuple[float, float]]:
        """Accumulated WAF over time, mean over seeds."""
        runs = self.runs[policy]
        return [
            (points[0][0], statistics.fmean(value for _, value in points))
            for points in zip(*(run.series for run in runs), strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """The shape that others rely on: `policies.NAME.…` and `ratios.A.B`."""
        names = list(self.runs)
        return {
            "traces": {"count": len(self.seeds), "recorded": self.recorded},
            "policies": {name: self._policy_json(name) for name in names},
            "ratios": {a: {b: self.ratio(a, b) for b in names if b != a} for a in names},
            "ratios_ci95": {a: {b: self.ratio_ci95(a, b) for b in names if b != a} for a in names},
        }

    def _policy_json(self, name: str) -> dict[str, Any]:
        runs = self.runs[name]
        return {
            "accumulated_waf": self.waf(name).as_json(),
            "goodput": self.goodput(name).as_json(),
            "gpu_seconds": {cause: self.gpu_seconds(name, cause).as_json() for cause in CAUSES},
            "jobs": {
                job: {
                    "steps": mean_of([run.jobs[job].steps for run in runs]).as_json(),
                    "flop": mean_of([run.jobs[job].flop for run in runs]).as_json(),
                    "faults": mean_of([run.jobs[job].faults for run in runs]).as_json(),
                    "restarts": mean_of([run.jobs[job].restarts for run in runs]).as_json(),
                    "recomputed_steps": mean_of([run.jobs[job].recomputed_steps for run in runs]).as_json(),
                    "saves": mean_of([run.jobs[job].saves for run in runs]).as_json(),
                    "skipped_saves": mean_of([run.jobs[job].skipped_saves for run in runs]).as_json(),
                    "note": next((run.jobs[job].note for run in runs if run.jobs[job].note), ""),
                }
                for job in runs[0].jobs
            },
        }


def compare(scenario: Scenario, names: Sequence[str], seeds: int, tick: Tick | None = None) -> Comparison:
    """Run every policy over `seeds` traces, drawn from the scenario's seed on. Raises `UsageError`."""
    return compare_case(prepare(scenario, tuple(names)), seeds, tick)


def compare_case(case: Case, seeds: int, tick: Tick | None = None) -> Comparison:
    """As `compare`, for a case that is ready. A trace that is the same for every seed is run once."""
    first, recorded = case.scenario.simulate.seed, is_recorded(case)
    numbers = (first,) if recorded else tuple(range(first, first + seeds))
    runs: dict[str, list[Result]] = {name: [] for name in case.policies}
    for seed in numbers:
        trace = case.trace(seed)
        for name in case.policies:
            runs[name].append(case.run(name, trace))
            if tick is not None:
                tick(f"{name}, seed {seed}")
    return Comparison(case.scenario, numbers, {name: tuple(found) for name, found in runs.items()}, recorded)


def is_recorded(case: Case) -> bool:
    """Whether the scenario's trace says all that happens, so that no seed makes a difference.

    Not so where a trace only gives counts or rates, or where preemptions, slow or late nodes come on top.
    """
    seed = case.scenario.simulate.seed
    return case.scenario.cluster.trace is not None and case.trace(seed) == case.trace(seed + 1)


@dataclass(frozen=True)
class Sweep:
    """One key at several values."""

    key: str
    points: tuple[tuple[Any, Comparison], ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "values": [{"value": value, **comparison.as_json()} for value, comparison in self.points],
        }


def sweep(
    path: Path,
    overrides: Mapping[str, object],
    key: str,
    values: Sequence[object],
    names: Sequence[str],
    seeds: int,
    tick: Tick | None = None,
) -> Sweep:
    """The scenario of `path` with `key` at each of `values`. Raises `UsageError` for a key or value it
    refuses.
    """
    scenarios = [load_scenario(path, {**overrides, key: value}) for value in values]
    points = [
        (value, compare(scenario, names, seeds, tick))
        for value, scenario in zip(values, scenarios, strict=True)
    ]
    return Sweep(key, tuple(points))

"""What a scenario must be beyond its schema, for whoever plans or simulates it: settings that policies
know, and a size that ends.

Every check raises `UsageError` with one line that names the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perdure.core.curve import Curve
from perdure.core.policies import POLICIES, make
from perdure.core.policies.base import Policy
from perdure.schema.cluster import Job, Scenario
from perdure.schema.errors import UsageError

CELLS_MAX = 5e9
"""Jobs × node counts × nodes of one plan; so many take about half a minute."""
SAVES_MAX = 1e6
"""Checkpoints of all jobs in one run; so many take about half a minute."""
SAVE_EVERY_MIN_S = 1e-3
STEP_MIN_S = 1e-4
"""A shorter step is a typing error; in years of such steps floating point cannot tell one from the next."""


def check_policies(scenario: Scenario) -> dict[str, Policy]:
    """Every `[policy.NAME]` table must be one that its policy understands, of jobs that are there.

    Returns all policies, made with their tables.
    """
    for name in scenario.policy:
        if name not in POLICIES:
            raise UsageError(f"policy.{name}: unknown policy, expected one of {', '.join(POLICIES)}")
    policies = {name: make(name, scenario.policy.get(name)) for name in POLICIES}
    jobs = {job.name for job in scenario.job}
    for name, policy in policies.items():
        for field in policy.settings.__struct_fields__:
            table = getattr(policy.settings, field)
            strangers = sorted(set(table) - jobs) if isinstance(table, dict) else []
            if strangers:
                known = ", ".join(sorted(jobs))
                raise UsageError(
                    f"policy.{name}.{field}.{strangers[0]}: no such job, expected one of {known}"
                )
    return policies


def check_size(scenario: Scenario, more_jobs: Iterable[Job] = ()) -> None:
    """A plan of the jobs on the nodes and spares must end in reasonable time."""
    cluster = scenario.cluster
    nodes = cluster.nodes + cluster.spares
    counts = sum(min(-(-job.gpus.max // cluster.gpus_per_node), nodes) for job in (*scenario.job, *more_jobs))
    if counts * nodes > CELLS_MAX:
        raise UsageError(
            f"job.gpus.max: the jobs can have {counts:,} different numbers of nodes on {nodes:,} nodes and "
            f"spares, expected a product of at most {CELLS_MAX:.0e}: fewer nodes or smaller maxima"
        )


def save_every_min_s(scenario: Scenario) -> float:
    """The shortest time between checkpoints that `check_saves` accepts, in s."""
    return max(SAVE_EVERY_MIN_S, scenario.simulate.days * 86_400.0 * len(scenario.job) / SAVES_MAX)


def check_saves(scenario: Scenario, policies: Mapping[str, Policy]) -> None:
    """Checkpoints must be so rare that a simulation of them ends in reasonable time."""
    rarer = save_every_min_s(scenario)
    for name, policy in policies.items():
        every_s = getattr(policy.settings, "save_every_s", None)
        if every_s is None:
            continue
        if every_s < rarer:
            days, jobs = scenario.simulate.days, len(scenario.job)
            raise UsageError(
                f"policy.{name}.save_every_s: {every_s:g} s in {days:g} days of {jobs} job"
                f"{'s' if jobs > 1 else ''}, expected at least {rarer:.3g} s or fewer days"
            )


def check_steps(curves: Iterable[Curve], policies: Mapping[str, Policy]) -> None:
    """The steps of a simulated job must not be absurdly short, by its own speed and by what was measured."""
    for curve in curves:
        shortest = curve.step_s(curve.nodes_max)
        if shortest < STEP_MIN_S:
            raise UsageError(
                f"job.{curve.name}: {shortest:.3g} s a step at its fastest, expected at least {STEP_MIN_S:g} "
                "s: check global_batch, flop_per_sample and the speeds"
            )
        batch = curve.job.model.global_batch if curve.job.model is not None else curve.job.global_batch
        for name, policy in policies.items():
            pairs = getattr(policy.settings, "measured", {}).get(curve.name, ())
            rate = max((rate for _, rate in pairs), default=0.0)
            if batch is not None and rate * STEP_MIN_S > batch:
                raise UsageError(
                    f"policy.{name}.measured.{curve.name}: {rate:g} samples per second are a step of "
                    f"{batch / rate:.3g} s, expected at least {STEP_MIN_S:g} s"
                )

"""What a scenario must be beyond its schema, for whoever plans or simulates it: settings that policies
know, and a size that ends.

Every check raises `UsageError` with one line that names the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perdure.core.policies import POLICIES, make
from perdure.core.policies.base import Policy
from perdure.schema.cluster import Job, Scenario
from perdure.schema.errors import UsageError

CELLS_MAX = 5e9
"""Jobs × node counts × nodes of one plan; so many take about half a minute."""
SAVES_MAX = 1e6
"""Checkpoints of all jobs in one run; so many take about half a minute."""
SAVE_EVERY_MIN_S = 1e-3


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

"""From a scenario to what a simulation takes: jobs with their speeds, the planner, and a trace for a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from perdure.core.cost import expected_running, node_loss_rate, transition_seconds
from perdure.core.curve import job_curve
from perdure.core.gpus import gpu_kind
from perdure.core.policies.base import Policy
from perdure.core.policies.work import workload
from perdure.core.scenario_checks import check_policies, check_saves, check_size, check_steps
from perdure.schema.cluster import FailureProcess, Scenario
from perdure.schema.errors import UsageError
from perdure.sim.cluster import JobSpec, Result, Setup, simulate
from perdure.sim.dealing import Planner
from perdure.sim.generators import generate
from perdure.sim.happenings import Trace, together
from perdure.sim.studies import rates_of_table
from perdure.sim.traces import read_trace


@dataclass(frozen=True)
class Case:
    """A scenario made ready; `policies` keep the plans and templates that they have made, over all runs."""

    scenario: Scenario
    setup: Setup
    planner: Planner
    policies: Mapping[str, Policy]

    def trace(self, seed: int) -> Trace:
        """What happens to the nodes; the same for every policy. Raises `UsageError`."""
        return trace_of(self.scenario, seed)

    def run(self, policy: str, trace: Trace, keep_log: bool = False) -> Result:
        """One run of a policy by its name."""
        return simulate(self.setup, self.policies[policy], trace, self.planner, keep_log)


def trace_of(scenario: Scenario, seed: int) -> Trace:
    """Read or draw the happenings of a scenario.

    A recorded trace stands in place of drawn faults; preemptions, slow nodes and late nodes that the scenario
    names come on top of it. Raises `UsageError`.
    """
    cluster, days = scenario.cluster, scenario.simulate.days
    if cluster.trace is None:
        return generate(cluster, days, seed)
    table = rates_of_table(cluster)
    if table is not None:
        return generate(table, days, seed)
    if cluster.failures != FailureProcess():
        raise UsageError(
            "cluster.failures: cluster.trace says already when nodes fail, expected only one of the two"
        )
    more = generate(replace(cluster, trace=None, mtbf_hours_per_node=None), days, seed)
    return together(read_trace(cluster, seed), more)


def prepare(scenario: Scenario, names: tuple[str, ...]) -> Case:
    """Make `scenario` ready for the policies `names`. Raises `UsageError`."""
    known = check_policies(scenario)
    policies = {name: known[name] for name in names}
    check_size(scenario)
    check_saves(scenario, policies)
    cluster = scenario.cluster
    kind = gpu_kind(scenario)
    curves = [job_curve(job, cluster, kind) for job in scenario.job]
    check_steps(curves, policies)
    works = [workload(curve) for curve in curves]
    setup = Setup(
        nodes=cluster.nodes,
        spares=cluster.spares,
        gpus_per_node=cluster.gpus_per_node,
        storage_bytes_s=cluster.storage_gb_s * 1e9,
        span_s=scenario.simulate.days * 86_400.0,
        jobs=tuple(
            JobSpec(work, job.arrive_hours * 3600.0, float(job.steps or math.inf))
            for work, job in zip(works, scenario.job, strict=True)
        ),
    )
    transitions = [transition_seconds(curve, scenario) for curve in curves]
    planner = Planner(works, transitions, cluster.nodes, expected_running(loss_rate(scenario)))
    return Case(scenario, setup, planner, policies)


def loss_rate(scenario: Scenario) -> float:
    """Losses per node and second that planners believe in: the cluster's own, or those that its trace shows.

    A trace shows the losses of the simulated days, or of its own length where that is shorter.
    """
    cluster = scenario.cluster
    if cluster.mtbf_hours_per_node is not None:
        return node_loss_rate(cluster)
    table = rates_of_table(cluster)
    if table is not None:
        return node_loss_rate(table)
    trace = read_trace(cluster)
    span_s = scenario.simulate.days * 86_400.0
    if trace.happenings:
        span_s = min(span_s, trace.happenings[-1].time_s) or span_s
    recorded = trace.losses_until(span_s) / (span_s * (cluster.nodes + cluster.spares))
    taken = cluster.preemption
    return recorded + (1 / (taken.mean_hours_per_node * 3600.0) if taken is not None else 0.0)

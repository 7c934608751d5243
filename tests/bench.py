"""Small jobs and clusters for the tests of policies and of the simulator, with numbers made to be worked
by hand.
"""

from __future__ import annotations

from typing import Any

from perdure.core.cost import expected_running
from perdure.core.curve import job_curve
from perdure.core.gpus import KINDS
from perdure.core.policies import make
from perdure.core.policies.work import Workload, workload
from perdure.schema.cluster import Cluster, GpuRange, Job, Model
from perdure.schema.measured import Measured
from perdure.sim.cluster import JobSpec, Result, Setup, simulate
from perdure.sim.dealing import Planner
from perdure.sim.happenings import Happening, Trace

SMALL = Model(layers=12, hidden=1024, heads=16, sequence=1024, vocabulary=50_304, global_batch=96)


def cluster(nodes: int, gpus_per_node: int = 1, **more: Any) -> Cluster:
    """A cluster that never fails by itself."""
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu="A100-80GB", mtbf_hours_per_node=1e6, **more)


def plain_job(
    nodes: int, step_s: float = 10.0, name: str = "job", gpus_per_node: int = 1, least: int = 1, **more: Any
) -> Workload:
    """A job whose step takes `step_s` on `nodes` nodes and inversely more on fewer; 8 samples of 1 TFLOP;
    10 GB.
    """
    counts = tuple(range(1, nodes + 1))
    measured = Measured(
        unit="step_s",
        gpus=tuple(count * gpus_per_node for count in counts),
        values=tuple(step_s * nodes / count for count in counts),
    )
    job = Job(
        name=name,
        gpus=GpuRange(min=least * gpus_per_node, max=nodes * gpus_per_node, step=gpus_per_node),
        throughput="measured.csv",
        measured=measured,
        global_batch=8,
        flop_per_sample=1e12,
        state_gb=10.0,
        **more,
    )
    return workload(job_curve(job, cluster(nodes, gpus_per_node), KINDS["A100-80GB"]))


def modelled_job(nodes: int, gpus_per_node: int = 1, model: Model = SMALL, name: str = "gpt") -> Workload:
    """A job that is known by its model."""
    job = Job(name=name, gpus=GpuRange(min=1, max=nodes * gpus_per_node), model=model)
    return workload(job_curve(job, cluster(nodes, gpus_per_node), KINDS["A100-80GB"]))


def run(
    policy: str,
    jobs: list[Workload],
    nodes: int,
    happenings: list[Happening],
    span_s: float,
    settings: dict[str, Any] | None = None,
    spares: int = 0,
    storage_gb_s: float = 1.0,
    absent: frozenset[int] = frozenset(),
    steps: float = float("inf"),
    keep_log: bool = True,
) -> Result:
    """One run with its log kept; the storage moves 1 GB/s, so a state of 10 GB takes 10 s."""
    setup = Setup(
        nodes=nodes,
        spares=spares,
        gpus_per_node=jobs[0].gpus_per_node,
        storage_bytes_s=storage_gb_s * 1e9,
        span_s=span_s,
        jobs=tuple(JobSpec(job, steps=steps) for job in jobs),
    )
    planner = Planner(jobs, [20.0] * len(jobs), nodes, expected_running(1e-6))
    trace = Trace(tuple(sorted(happenings, key=lambda event: event.time_s)), absent)
    return simulate(setup, make(policy, settings), trace, planner, keep_log)

"""A job's throughput as a function of the nodes it is given, from the analytic model or from measurements.

The planner knows nothing else of a job's speed. A curve never falls: a job that is slower on more GPUs leaves
the surplus idle, and `gpus` says how many it uses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from perdure.core.throughput import DEFAULT as DEFAULT_EFFICIENCY
from perdure.core.throughput import Efficiency, Layout, Machine, best_layout, step_seconds
from perdure.schema.cluster import Cluster, GpuKind, Job
from perdure.schema.errors import UsageError
from perdure.schema.measured import Measured

CHECKPOINT_BYTES_PER_PARAMETER = 14
"""Mixed precision with Adam: 2 of weight, 4 + 4 + 4 of fp32 weight and moments; gradients are not kept."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a job achieves on n nodes, for n = 0 … `nodes_max`.

    `flops_per_s[n]`: achieved FLOP/s of the whole job, recomputation not counted; 0 where it cannot run.
    `gpus[n]`: the GPUs it uses there. More nodes than `nodes_max` change nothing.
    """

    name: str
    flops_per_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    job: Job
    machine: Machine

    @property
    def nodes_max(self) -> int:
        """The largest useful number of nodes, on this cluster."""
        return self.flops_per_s.size - 1

    def at(self, nodes: int) -> float:
        """Achieved FLOP/s on `nodes` nodes, of which there may be more than `nodes_max`."""
        return float(self.flops_per_s[min(nodes, self.nodes_max)])

    def step_s(self, nodes: int) -> float:
        """Seconds per optimizer step on `nodes` nodes; infinite where the job cannot run."""
        speed = self.at(nodes)
        return step_flop(self.job) / speed if speed > 0 else float("inf")

    def layout(self, nodes: int) -> Layout | None:
        """The layout behind the curve; None where the job cannot run or its speed was measured."""
        if self.job.model is None or self.job.measured is not None:
            return None
        gpus = int(self.gpus[min(nodes, self.nodes_max)])
        return best_layout(self.job.model, self.machine, gpus)


def job_curve(
    job: Job, cluster: Cluster, kind: GpuKind, efficiency: Efficiency = DEFAULT_EFFICIENCY
) -> Curve:
    """The curve of `job` on nodes of `cluster`. Raises `UsageError` if it can run on no allowed number."""
    per_node = cluster.gpus_per_node
    machine = Machine(kind=kind, gpus_per_node=per_node, efficiency=efficiency)
    # A spare or a repaired node may come on top of the planned ones: curves reach as far as machines do.
    limit = min(job.gpus.max, (cluster.nodes + cluster.spares) * per_node)
    nodes = np.arange(-(-job.gpus.min // per_node), -(-limit // per_node) + 1, dtype=np.int64)
    # On n nodes the job uses the largest allowed count that they have.
    steps = (np.minimum(nodes * per_node, limit) - job.gpus.min) // job.gpus.step
    allowed = job.gpus.min + steps * job.gpus.step
    speed = (
        _measured_flops(job, allowed) if job.measured is not None else _modelled_flops(job, machine, allowed)
    )
    if not (speed > 0).any():
        raise UsageError(
            f"job.{job.name}: no layout fits the memory of {cluster.gpu} on {job.gpus.min} to {limit} GPUs, "
            "expected a smaller model, more GPUs or a kind with more memory"
        )
    size = int(nodes[-1]) + 1
    flops, gpus = np.zeros(size), np.zeros(size, dtype=np.int64)
    flops[nodes] = speed
    gpus[nodes] = np.where(speed > 0, allowed, 0)
    # Fewer GPUs than given where that is faster: each count inherits the best of the counts below it.
    best = np.maximum.accumulate(np.where(flops >= np.maximum.accumulate(flops), np.arange(size), 0))
    return Curve(name=job.name, flops_per_s=flops[best], gpus=gpus[best], job=job, machine=machine)


def _modelled_flops(job: Job, machine: Machine, gpus: NDArray[np.int64]) -> NDArray[np.float64]:
    assert job.model is not None  # Job.problem: a job has a model or measurements
    return np.asarray(job.model.step_flop / step_seconds(job.model, machine, gpus))


def _measured_flops(job: Job, gpus: NDArray[np.int64]) -> NDArray[np.float64]:
    """Linear between measured counts and below the first one from the origin; flat above the last."""
    assert job.measured is not None
    counts = np.array((0, *job.measured.gpus), dtype=np.float64)
    values = np.array((0.0, *_as_flops(job, job.measured)))
    return np.asarray(np.interp(gpus, counts, values))


def _as_flops(job: Job, measured: Measured) -> list[float]:
    pairs = list(zip(measured.gpus, measured.values, strict=True))
    if measured.unit == "flops_per_s":
        return [value for _, value in pairs]
    if measured.unit == "tflops_per_gpu":
        return [value * 1e12 * gpus for gpus, value in pairs]
    if measured.unit == "samples_per_s":
        return [value * flop_per_sample(job) for _, value in pairs]
    return [step_flop(job) / value for _, value in pairs]


def flop_per_sample(job: Job) -> float:
    """FLOP of one sample, recomputation not counted. Raises `UsageError` if the job does not say."""
    if job.flop_per_sample is not None:
        return job.flop_per_sample
    if job.model is not None:
        return job.model.step_flop / job.model.global_batch
    raise UsageError(
        f"job.{job.name}.flop_per_sample: missing, expected it (or model) with measured samples or steps"
    )


def step_flop(job: Job) -> float:
    """FLOP of one optimizer step, recomputation not counted. Raises `UsageError` if the job does not say."""
    batch = job.model.global_batch if job.model is not None else job.global_batch
    if batch is None:
        raise UsageError(f"job.{job.name}.global_batch: missing, expected it (or model) to count steps")
    return flop_per_sample(job) * batch


def state_bytes(job: Job) -> float:
    """Bytes of a checkpoint: `state_gb`, or 14 per parameter of the model. Raises `UsageError`."""
    if job.state_gb is not None:
        return job.state_gb * 1e9
    if job.model is not None:
        return CHECKPOINT_BYTES_PER_PARAMETER * job.model.parameters
    raise UsageError(f"job.{job.name}.state_gb: missing, expected it (or model): the size of a checkpoint")

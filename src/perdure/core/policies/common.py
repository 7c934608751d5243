"""What several policies share: measured speeds, how faults come to light, layouts from step times."""

from __future__ import annotations

import bisect
import math
from typing import Annotated

import msgspec
from msgspec import Meta

from perdure.core.policies.base import Fault, Layout, Method, Speed, assumed, speed
from perdure.core.policies.work import Workload
from perdure.schema.tables import Table

Measurement = tuple[Annotated[int, Meta(ge=1)], Annotated[float, Meta(gt=0)]]


class Settings(Table, frozen=True):
    """Keys that every `[policy.NAME]` table knows.

    `measured` gives, for a job by its name, `[nodes, samples per second]` pairs that were measured under this
    policy; they then rule its speed there. Between two pairs the speed is interpolated, beyond the last one
    further nodes add nothing, below the first one the job does not run.
    """

    measured: dict[str, tuple[Measurement, ...]] = msgspec.field(default_factory=dict)

    def problem(self) -> str | None:
        for job, pairs in self.measured.items():
            nodes = [count for count, _ in pairs]
            if not nodes or len(set(nodes)) != len(nodes):
                return f"measured.{job}: {nodes}, expected [nodes, samples per second] with different nodes"
        return None

    def measured_layout(self, work: Workload, nodes: int, detail: object = None) -> Layout | None:
        """The layout of `work` on `nodes` nodes at its measured speed, which is its own ideal.

        None if it does not run there. Raises `KeyError` if nothing was measured for this job.
        """
        rate = interpolated(self.measured[work.name], nodes)
        if rate <= 0:
            return None
        return Layout(nodes, Speed(work.batch / rate, nodes * work.gpus_per_node, 1.0, 0.0, 0.0), detail)


def interpolated(pairs: tuple[Measurement, ...], nodes: int) -> float:
    """The value at `nodes` on the line through `pairs`; the last one beyond them, 0 below the first."""
    points = sorted(pairs)
    index = bisect.bisect_left(points, (nodes, 0.0))
    if index == len(points):
        return points[-1][1]
    if points[index][0] == nodes:
        return points[index][1]
    if index == 0:
        return 0.0
    (low, below), (high, above) = points[index - 1], points[index]
    return below + (above - below) * (nodes - low) / (high - low)


class Detection(Settings, frozen=True):
    """How faults come to light where nothing watches the training itself (Unicron's table of detections).

    A lost connection or a dead process is noticed at once by its agent; a hang, or a network error that every
    rank waits for, shows when the collective times out.
    """

    connection_s: Annotated[
        float, assumed("until a lost connection or a dead process is noticed, s", 1, 30, "worse")
    ] = 5.7
    timeout_s: Annotated[float, assumed("until a hanging collective gives up, s", 600, 1800, "worse")] = (
        1800.0
    )

    def detect_s(self, fault: Fault) -> float:
        """Seconds from the fault to the moment at which something is done about it."""
        return self.timeout_s if fault.method is Method.STATISTICAL else self.connection_s


def plain_layout(work: Workload, nodes: int, detail: object = None) -> Layout | None:
    """The layout of `work` on `nodes` nodes under its best parallel setting; None if it cannot run there."""
    step_s = work.ideal_step_s(nodes)
    if not math.isfinite(step_s):
        return None
    return Layout(nodes, Speed(step_s, work.used(nodes), 1.0, 0.0, 0.0), detail)


def ideal_step_s(work: Workload, nodes: int, gpus: int, otherwise: float) -> float:
    """A step on `gpus` GPUs at the best FLOP/s per GPU known on `nodes` nodes (or on the job's minimum).

    `otherwise` if none is known.
    """
    nodes = max(nodes, work.nodes_min)
    used = work.used(nodes)
    return work.ideal_step_s(nodes) * used / gpus if used else otherwise


def layout_of(
    work: Workload, nodes: int, gpus: int, healthy_s: float, actual_s: float, detail: object = None
) -> Layout:
    """A layout on `gpus` GPUs of `nodes` nodes: a step of `actual_s`, or `healthy_s` when nothing is
    broken.
    """
    ideal_s = ideal_step_s(work, nodes, gpus, healthy_s)
    # The models of pipelines leave small things out; no policy computes faster than the best setting known.
    least = max(1.0, ideal_s / healthy_s)
    return Layout(nodes, speed(gpus, ideal_s, healthy_s * least, actual_s * least), detail)

"""Varuna: on every change of workers the job is cut anew and restarted from its checkpoint ('morphing').

(Athlur et al., EuroSys'22; its public code.) Every worker is one GPU and one pipeline stage; there is no
tensor parallelism. With K cut-points, a global batch GB and G workers, for each depth pp that divides K:

    mbs = the largest micro-batch that fits;  dp = G // pp;  Nm = ceil(ceil(GB / dp) / mbs)
    T   = (Nm + pp − 1)·(F + R + B) + fill of the pipeline by communication + all-reduce, not overlapped

and the depth of least T is taken; G − pp·dp workers idle. The global batch stays what it was. (The public
code has GB // dp there: where dp does not divide GB its step leaves samples out. Here all are computed, in as
long as the pipelines with most of them take.) A checkpoint is kept per cut-point, so that any depth can load
it.

1. A notice of preemption: a checkpoint at the next boundary, then the restart without those that leave.
2. A failure: survivors exit; restart from the newest complete checkpoint; all since then is lost.
3. Growth: a checkpoint, then the restart with the new workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from perdure.core.policies.base import (
    Decision,
    Event,
    Fault,
    Layout,
    Leaving,
    Lost,
    Offered,
    Saving,
    Stage,
    View,
    assumed,
)
from perdure.core.policies.common import Detection, Measurement, interpolated, layout_of, plain_layout
from perdure.core.policies.work import Profile, Workload


@dataclass(frozen=True, slots=True)
class Morph:
    """One configuration: depth, width, micro-batch, micro-batches per pipeline, idle workers, step time."""

    pipeline: int
    data: int
    micro_batch: int
    micro_batches: int
    idle: int
    step_s: float


def largest_micro_batch(profile: Profile, pipeline: int, limit: int) -> int:
    """The largest micro-batch, in samples, with which a stage of K / `pipeline` layers fits a GPU; 0 if none.

    Activations are recomputed: a stage keeps its input for each of up to `pipeline` micro-batches in
    flight, and all activations of the one that it works on.
    """
    layers = profile.layers // pipeline
    free = profile.gpu_bytes - profile.training_bytes / pipeline
    per_sample = pipeline * profile.boundary_bytes(1) + layers * profile.activation_bytes(1)
    return max(0, min(limit, int(free // per_sample)))


def morph(profile: Profile, workers: int) -> Morph | None:
    """The configuration of least step time for `workers` GPUs, or None if none fits."""
    best: Morph | None = None
    kind = profile.machine.kind
    link = profile.node_bytes_s / profile.machine.gpus_per_node
    for pipeline in range(1, min(workers, profile.layers) + 1):
        if profile.layers % pipeline:
            continue
        data = min(workers // pipeline, profile.batch)
        share = math.ceil(profile.batch / data)
        size = largest_micro_batch(profile, pipeline, share)
        if size == 0:
            continue
        count = math.ceil(share / size)
        layers = profile.layers // pipeline
        one = profile.layer(1, size)
        stage_s = layers * (2 * one.forward_s + one.backward_s)
        send_s = profile.boundary_bytes(size) / link + 1e-6 * kind.inter_us
        gradients = 2 * profile.parameters_per_layer * layers
        reduce_s = profile.all_reduce_s(gradients, data, link)
        step_s = (count + pipeline - 1) * stage_s + 2 * (pipeline - 1) * send_s + reduce_s
        if best is None or step_s < best.step_s:
            best = Morph(pipeline, data, size, count, workers - pipeline * data, step_s)
    return best


class VarunaSettings(Detection, frozen=True):
    """Published for BERT-large … GPT-3 6.7B, by Oobleck: restart 76–701 s, checkpoint 11–120 s."""

    restart_s: Annotated[
        float, assumed("from the exit of the old processes to the first step, s", 49, 701, "worse")
    ] = 100.0
    restart_by_nodes: tuple[Measurement, ...] = ()
    """Measured `[nodes, seconds]` pairs that rule instead of `restart_s`."""
    rendezvous_s: Annotated[float, assumed("until all workers have met, s", 0, 60, "worse")] = 10.0
    save_every_s: Annotated[float, assumed("between checkpoints, s", 600, 7200, "either", above=0)] = 1800.0
    save_every_steps: Annotated[int, Meta(ge=1)] | None = None
    """Steps between checkpoints, where they are counted; rules instead of `save_every_s`."""
    save_s: Annotated[float, Meta(ge=0)] | None = None
    """How long a checkpoint stalls the job; None: as long as the shared storage takes to write it."""


class Varuna:
    """Job morphing."""

    name: ClassVar[str] = "varuna"
    deals: ClassVar[Literal["queue", "planner"]] = "queue"

    def __init__(self, settings: VarunaSettings) -> None:
        self.settings = settings
        self._morphs: dict[tuple[str, int], Layout | None] = {}

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        return self.cut(work, len(nodes))

    def cut(self, work: Workload, nodes: int) -> Layout | None:
        """The best layout on `nodes` nodes."""
        key = (work.name, nodes)
        if key not in self._morphs:
            self._morphs[key] = self._cut(work, nodes)
        return self._morphs[key]

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        if isinstance(event, Fault):
            return self._restart(work, view, event)
        if isinstance(event, Leaving) and view.layout is not None:
            return self._leave(work, view, event)
        if isinstance(event, Offered):
            return self._grow(work, view)
        return None

    def saving(self, work: Workload, layout: Layout) -> Saving:
        settings = self.settings
        every_s = settings.save_every_s if settings.save_every_steps is None else None
        if settings.save_s is not None:
            return Saving(every_s, settings.save_every_steps, stall_s=settings.save_s)
        return Saving(every_s, settings.save_every_steps, write_bytes=work.state_bytes, waits=True)

    def _cut(self, work: Workload, nodes: int) -> Layout | None:
        if nodes < work.nodes_min:
            return None
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes)
        if work.profile is None:
            return plain_layout(work, nodes)
        found = morph(work.profile, nodes * work.gpus_per_node)
        if found is None:
            return None
        return layout_of(work, nodes, found.pipeline * found.data, found.step_s, found.step_s, found)

    def _restart(self, work: Workload, view: View, fault: Fault) -> Decision:
        take = tuple(view.free[: view.nominal - len(view.held)]) if fault.severity == 1 else ()
        nodes = len(view.held) + len(take)
        layout = self.cut(work, nodes)
        detect_s = self.settings.detect_s(fault)
        if layout is None:
            return Decision(None, f"no cut fits {nodes} nodes", detect_s, lost=Lost.CHECKPOINT, take=take)
        reason = f"restarts on {nodes} nodes from the newest checkpoint"
        return Decision(layout, reason, detect_s, self._stages(work, nodes), Lost.CHECKPOINT, take=take)

    def _leave(self, work: Workload, view: View, event: Leaving) -> Decision:
        nodes = len(view.held) - len(event.nodes)
        layout = self.cut(work, nodes)
        reason = f"checkpoints at the boundary and morphs to {nodes} nodes"
        if layout is None:
            return Decision(None, reason, release=event.nodes, save_first=True)
        return Decision(
            layout, reason, stages=self._stages(work, nodes), release=event.nodes, save_first=True
        )

    def _grow(self, work: Workload, view: View) -> Decision | None:
        take = tuple(view.free[: max(0, view.nominal - len(view.held))])
        nodes = len(view.held) + len(take)
        layout = self.cut(work, nodes)
        if layout is None or (view.layout is not None and not take):
            return Decision(None, "waits for more nodes", take=take) if take and view.layout is None else None
        running = view.layout is not None
        reason = f"morphs to {nodes} nodes" if running else f"starts on {nodes} nodes"
        return Decision(layout, reason, stages=self._stages(work, nodes), take=take, save_first=running)

    def _stages(self, work: Workload, nodes: int) -> tuple[Stage, ...]:
        settings = self.settings
        rendezvous = Stage("rendezvous", settings.rendezvous_s)
        if settings.restart_by_nodes:  # measured as a whole, loading included
            return (rendezvous, Stage("restart", interpolated(settings.restart_by_nodes, nodes)))
        load = Stage("load", read_bytes=work.state_bytes)
        return (rendezvous, Stage("restart", settings.restart_s), load)

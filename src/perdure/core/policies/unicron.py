"""Unicron: four detections, three severities, partial results kept, state from the nearest place, one plan.

(He et al., arXiv 2401.00134.)

1. Detection: lost node 5.6 s, dead process 1.8 s, exception 0.3 s, hang 3 × the mean iteration time.
2. SEV3: retry in place. SEV2: restart the process on its node. SEV1: isolate the node; the planner deals the
   nodes of all jobs anew and every job whose nodes change is reconfigured. An action that fails escalates to
   the next severity.
3. The step in progress is not lost. Before the gradient all-reduce survivors keep what they accumulated
   and the failed rank's micro-batches are dealt out to the others; once the all-reduce has begun only
   segments that are not yet reduced are repeated. What is computed again is the failed replica's share.
4. State comes from a data-parallel replica; if none lives, from the copy in host memory (every `memory_steps`
   steps, as Gemini keeps it, on another node); if that is gone too, from remote storage.
5. A step beyond 1.1 × the mean is reported as slow, beyond 3 × the node counts as failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from perdure.core.policies.base import (
    Decision,
    Event,
    Fault,
    Layout,
    Leaving,
    Lost,
    Method,
    Offered,
    Saving,
    Slowed,
    Stage,
    View,
    assumed,
)
from perdure.core.policies.common import Settings, plain_layout
from perdure.core.policies.work import Workload

SLOW = 1.1
FAILED = 3.0
"""Multiples of the mean iteration time: beyond the first 'slow', beyond the second 'failed'."""


def lost_share(step_done: float, replicas: int, lost_replicas: int, reduce_share: float) -> float:
    """Which share of the work done in a step has to be done again when `lost_replicas` of `replicas` fail.

    Before the all-reduce (the last `reduce_share` of a step) it is their own part; during it the gradients
    are complete everywhere and only unreduced segments are sent again, so nothing is computed again.
    """
    if step_done >= 1 - reduce_share:
        return 0.0
    return min(1.0, lost_replicas / replicas)


class UnicronSettings(Settings, frozen=True):
    """The detection times are published; what a retry, a restart and a reconfiguration take is not."""

    node_s: Annotated[float, assumed("until a lost node is noticed, s", 1, 30, "worse")] = 5.6
    process_s: Annotated[float, assumed("until a dead process is noticed, s", 0.1, 10, "worse")] = 1.8
    exception_s: Annotated[float, assumed("until an exception is reported, s", 0.1, 5, "worse")] = 0.3
    retry_s: Annotated[float, assumed("to connect again in place, s", 1, 60, "worse")] = 10.0
    restart_s: Annotated[float, assumed("to restart a process on its node, s", 20, 300, "worse")] = 60.0
    reconfigure_s: Annotated[
        float, assumed("to set a job up on other nodes, the move of state not included, s", 15, 300, "worse")
    ] = 60.0
    reduce_share: Annotated[float, assumed("share of a step in the all-reduce", 0.0, 0.3, "better")] = 0.05
    memory_steps: Annotated[int, Meta(ge=0)] = 1
    """Steps between copies of the state in other hosts' memory; 0: none."""
    save_every_s: Annotated[float, assumed("between remote checkpoints, s", 600, 7200, "either", above=0)] = (
        1800.0
    )


class Unicron:
    """Self-healing with one plan for the cluster."""

    name: ClassVar[str] = "unicron"
    deals: ClassVar[Literal["queue", "planner"]] = "planner"

    def __init__(self, settings: UnicronSettings) -> None:
        self.settings = settings

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        return self.layout(work, len(nodes))

    def layout(self, work: Workload, nodes: int) -> Layout | None:
        """The best parallel setting on `nodes` nodes: healthy throughput equals Megatron's."""
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes)
        return plain_layout(work, nodes)

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        match event:
            case Fault(severity=1):
                return self._isolate(work, view, event)
            case Fault():
                return self._in_place(work, view, event)
            case Slowed(node=node, factor=factor) if factor > FAILED:
                return self._isolate(work, view, Fault(1, Method.STATISTICAL, (node,), 0.0), (node,))
            case Leaving() | Offered():
                return self._change(work, view)
        return None  # a node that is merely slow is reported

    def saving(self, work: Workload, layout: Layout) -> Saving:
        settings = self.settings
        return Saving(
            every_s=settings.save_every_s,
            write_bytes=work.state_bytes,
            memory_steps=settings.memory_steps,
        )

    def detect_s(self, fault: Fault, step_s: float) -> float:
        """Seconds until the fault is known, by the way in which it shows."""
        settings = self.settings
        known = {
            Method.NODE: settings.node_s,
            Method.PROCESS: settings.process_s,
            Method.EXCEPTION: settings.exception_s,
        }
        return known.get(fault.method, FAILED * step_s)

    def actions(self, work: Workload, fault: Fault) -> tuple[Stage, ...]:
        """The attempts in order: what the error's grade suggests first, escalating to what cures it."""
        settings = self.settings
        replica = work.state_bytes / work.replica_nodes(work.nodes_min) / work.node_bytes_s
        attempts = {
            3: Stage("retry in place", settings.retry_s),
            2: Stage("restart the process", settings.restart_s + replica),
        }
        first = fault.graded or fault.severity
        return tuple(
            attempts[grade] for grade in range(first, max(fault.severity, 2) - 1, -1) if grade in attempts
        )

    def _in_place(self, work: Workload, view: View, fault: Fault) -> Decision:
        """SEV3 and SEV2: the same nodes, the same layout."""
        if view.layout is None:
            return Decision(None, "waits for nodes")
        detect_s = self.detect_s(fault, view.layout.speed.step_s)
        reason = {3: "retries in place", 2: "restarts the process on its node"}[fault.severity]
        if fault.severity == 3:  # every rank still has its gradients: the collective alone is repeated
            return Decision(view.layout, reason, detect_s, self.actions(work, fault))
        replicas = work.replicas(view.layout.nodes)
        lost, share = self._rollback(work, replicas, min(1, replicas), fault.step_done)
        return Decision(view.layout, reason, detect_s, self.actions(work, fault), lost, share)

    def _isolate(self, work: Workload, view: View, fault: Fault, release: tuple[int, ...] = ()) -> Decision:
        """SEV1: without the node, on what the planner dealt."""
        give = tuple(dict.fromkeys((*view.give, *release)))
        nodes = len(view.held) + len(view.free) - len(give)
        layout = self.layout(work, nodes)
        before = view.layout
        step_s = before.speed.step_s if before is not None else 0.0
        detect_s = self.detect_s(fault, step_s)
        replicas = work.replicas(before.nodes) if before is not None else 1
        gone = -(-len(fault.nodes) // work.replica_nodes(before.nodes)) if before is not None else 1
        lost, share = self._rollback(work, replicas, gone, fault.step_done)
        stages = self.reconfiguration(work, before, nodes, lost)
        if fault.graded and fault.graded > 1:
            stages = (*self.actions(work, fault), *stages)
        reason = f"isolates {len(fault.nodes)} nodes, goes on with {nodes}"
        if layout is None:
            return Decision(
                None, f"{nodes} nodes are too few", detect_s, (), lost, share, tuple(view.free), give
            )
        return Decision(layout, reason, detect_s, stages, lost, share, tuple(view.free), give)

    def _change(self, work: Workload, view: View) -> Decision | None:
        """The plan gives or takes nodes at a boundary: no step is lost."""
        if not view.free and not view.give and view.layout is not None:
            return None
        nodes = len(view.held) + len(view.free) - len(view.give)
        layout = self.layout(work, nodes)
        take = tuple(view.free)
        if layout is None:
            running = view.layout is not None
            reason = f"{nodes} nodes are too few"
            return Decision(None, reason, take=take, release=view.give, save_first=running)
        lost = Lost.NOTHING if view.layout is not None else Lost.CHECKPOINT
        stages = self.reconfiguration(work, view.layout, nodes, lost)
        return Decision(layout, f"the plan gives {nodes} nodes", stages=stages, take=take, release=view.give)

    def reconfiguration(
        self, work: Workload, before: Layout | None, nodes: int, lost: Lost
    ) -> tuple[Stage, ...]:
        """Set-up on `nodes` nodes and the move of state from the nearest place that has it."""
        setup = Stage("reconfigure", self.settings.reconfigure_s)
        if before is None or lost is Lost.CHECKPOINT:
            return (setup, Stage("load", read_bytes=work.state_bytes))
        return (setup, Stage("move state", work.state_bytes / max(1, nodes) / work.node_bytes_s))

    def _rollback(self, work: Workload, replicas: int, gone: int, step_done: float) -> tuple[Lost, float]:
        """What is lost with `gone` of `replicas` copies: a live replica, host memory, remote storage."""
        if gone < replicas:
            return Lost.SHARE, lost_share(step_done, replicas, gone, self.settings.reduce_share)
        if self.settings.memory_steps and gone <= 1:
            return Lost.MEMORY, 0.0
        return Lost.CHECKPOINT, 0.0

"""perdure: survivors keep computing, and only the dead worker's share of one step is done again.

What DESIGN promises, with the times that the live system takes as assumptions:

1. Detection: a dead process by its pidfd and an exception at once, a lost node by its lease, a hang by
   progress that stands still for 3 × the mean step.
2. SEV3: a new generation in place. The leaves of the step are kept on every worker, so nothing is computed
   again (G2).
3. SEV2: survivors regroup without the worker, take over its micro-batches and go on; its replacement,
   forked from a process that has imported everything, receives the state while they compute, and joins at
   a boundary. The cost is one worker's share of one step, and one replica less until the replacement is
   there.
4. SEV1: the same; the replacement comes from a standby on another node if the plan has one, otherwise the
   job goes on with fewer replicas. Only where the cut of the model itself must change is state dealt out
   anew.
5. Growth, shrinking and notices of preemption interrupt nobody: the next generation is built in the
   background and all switch at a boundary.
6. State comes from a live replica, else from host memory, else from disk; a slow node is replaced, or left
   out where the job is faster without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from perdure.core.policies.base import (
    Decision,
    Event,
    Fault,
    Later,
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
    speed,
)
from perdure.core.policies.common import Settings, layout_of, plain_layout
from perdure.core.policies.work import Workload
from perdure.core.throughput import Layout as Setting

HANG = 3.0
"""A worker that makes no progress for so many mean steps is dead."""


class PerdureSettings(Settings, frozen=True):
    """Measured on CPUs: a death known in 5 ms, survivors regrouped in 3–100 ms; on GPUs at scale, assumed."""

    node_s: Annotated[float, assumed("the lease after which a silent node is lost, s", 1, 30, "worse")] = 5.0
    process_s: Annotated[float, assumed("until a dead process is noticed, s", 0.005, 1, "worse")] = 0.05
    exception_s: Annotated[float, assumed("until an exception is reported, s", 0.005, 1, "worse")] = 0.05
    regroup_s: Annotated[float, assumed("to form the next generation's group, s", 0.1, 10, "worse")] = 2.0
    start_s: Annotated[
        float, assumed("until a replacement on its own node can receive state, s", 1, 60, "worse")
    ] = 15.0
    recut_s: Annotated[
        float,
        assumed("to set up another cut of the model, the move of state not included, s", 5, 120, "worse"),
    ] = 30.0
    snapshot_s: Annotated[float, assumed("stall of a snapshot in host memory, s", 0, 10, "worse")] = 1.0
    memory_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps between copies of the state in other hosts' memory; 0: none."""
    save_every_s: Annotated[
        float, assumed("between checkpoints on disk, s", 600, 7200, "either", above=0)
    ] = 1800.0


class Perdure:
    """Partial results, standbys, background joins, one plan."""

    name: ClassVar[str] = "perdure"
    deals: ClassVar[Literal["queue", "planner"]] = "planner"

    def __init__(self, settings: PerdureSettings) -> None:
        self.settings = settings

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        return self.layout(work, len(nodes))

    def layout(self, work: Workload, nodes: int) -> Layout | None:
        """The best parallel setting on `nodes` nodes; None if the job cannot run there."""
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes, Cut(None))
        return plain_layout(work, nodes, Cut(work.setting(nodes)))

    def onto(
        self, work: Workload, before: Layout, nodes: int, running_s: float
    ) -> tuple[Layout | None, tuple[Stage, ...]]:
        """What to run on `nodes` nodes after `before`, and how all must wait for it.

        Replicas that stay cut as they are cost nothing. Another cut is faster perhaps, but while the state
        is dealt out anew everybody waits: it is taken if it gets more done in `running_s`, the expected time
        until the next loss.
        """
        best = self.layout(work, nodes)
        if best is None:
            return None, ()
        old, new = before.detail.setting, best.detail.setting
        if old is None or new is None or (old.tensor, old.pipeline) == (new.tensor, new.pipeline):
            return best, ()
        move_s = work.state_bytes / max(1, min(before.nodes, nodes)) / work.node_bytes_s
        stages = (Stage("cut anew", self.settings.recut_s), Stage("move state", move_s))
        kept = work.cut_setting(nodes, old.tensor, old.pipeline)
        if kept is None or not math.isfinite(running_s):
            return best, stages
        stall_s = sum(stage.seconds for stage in stages)
        if running_s / kept.step_s < (running_s - stall_s) / best.speed.step_s:
            return best, stages
        gpus = kept.tensor * kept.pipeline * kept.data
        return layout_of(work, nodes, gpus, best.speed.step_s, kept.step_s, Cut(kept)), ()

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        match event:
            case Fault(severity=3):
                return self._again(work, view, event)
            case Fault():
                return self._heal(work, view, event)
            case Leaving(nodes=nodes):
                return self._switch(work, view, nodes)
            case Slowed():
                return self._leave_out(work, view, event)
            case Offered():
                return self._switch(work, view, ())
        return None

    def saving(self, work: Workload, layout: Layout) -> Saving:
        settings = self.settings
        return Saving(
            every_s=settings.save_every_s,
            stall_s=settings.snapshot_s,
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
        return known.get(fault.method, HANG * step_s)

    def _again(self, work: Workload, view: View, fault: Fault) -> Decision:
        """SEV3: the same members in a new generation, every leaf kept; who was joining goes on joining."""
        before = view.layout
        if before is None:
            return Decision(None, "waits for nodes")
        detect_s = self.detect_s(fault, before.speed.step_s)
        plan = self._carry_on(work, view, before.nodes, before.detail.missing, ())
        stages = (Stage("regroup", self.settings.regroup_s), *plan.stages)
        return Decision(plan.layout, "regroups in place", detect_s, stages, later=plan.later)

    def _heal(self, work: Workload, view: View, fault: Fault) -> Decision:
        """SEV2 and SEV1: go on without the lost worker or nodes; replacements join in the background."""
        before, give = view.layout, view.give
        if before is None:
            return self._switch(work, view, ()) or Decision(None, "waits for nodes")
        detect_s = self.detect_s(fault, before.speed.step_s)
        missing, in_use = before.detail.missing, before.nodes - len(give)
        live = replicas(before) - missing
        gone = 1 if fault.severity == 2 else math.ceil(len(fault.nodes) / spans(work, before))
        if gone >= live:
            return self._restore(work, view, fault, detect_s)
        if fault.severity == 2:
            missing += 1
            reason = "the others go on; the worker's replacement joins at a boundary"
        else:
            in_use -= len(fault.nodes)
            reason = f"goes on with {in_use} nodes"
        plan = self._carry_on(work, view, in_use, missing, give)
        decision = Decision(
            plan.layout, reason, detect_s, (), Lost.SHARE, gone / live, tuple(view.free), give
        )
        if plan.layout is None:
            return replace(decision, reason="too few nodes are left")
        stages = (Stage("regroup", self.settings.regroup_s), *plan.stages)
        return replace(decision, stages=stages, later=plan.later)

    def _restore(self, work: Workload, view: View, fault: Fault, detect_s: float) -> Decision:
        """No live replica: host memory if one node was lost (another has its copy), else the checkpoint."""
        memory = self.settings.memory_steps > 0 and len(fault.nodes) <= 1
        lost = Lost.MEMORY if memory else Lost.CHECKPOINT
        nodes = len(view.held) + len(view.free) - len(view.give)
        layout = self.layout(work, nodes)
        take, give = tuple(view.free), view.give
        if layout is None:
            return Decision(None, f"{nodes} nodes are too few", detect_s, (), lost, 0.0, take, give)
        source = (
            Stage("move state", work.state_bytes / nodes / work.node_bytes_s)
            if memory
            else Stage("load", read_bytes=work.state_bytes)
        )
        stages = (Stage("start", self.settings.start_s + self.settings.recut_s), source)
        return Decision(layout, f"restores from {lost.name.lower()}", detect_s, stages, lost, 0.0, take, give)

    def _switch(self, work: Workload, view: View, leaving: tuple[int, ...]) -> Decision | None:
        """Nodes come or go on purpose: everything is made ready in the background, then all switch."""
        take, give = tuple(view.free), tuple(dict.fromkeys((*view.give, *leaving)))
        before = view.layout
        if not take and not give and before is not None:
            return None
        nodes = len(view.held) + len(take) - len(give)
        if before is None:
            layout = self.layout(work, nodes)
            if layout is None:
                return Decision(None, f"{nodes} nodes are too few", take=take, release=give)
            load = Stage("load", read_bytes=work.state_bytes)
            first = (Stage("start", self.settings.start_s), load)
            return Decision(layout, "starts", stages=first, take=take, release=give)
        plan = self._carry_on(work, view, before.nodes - len(give), before.detail.missing, give)
        if plan.layout is None:
            reason = f"{nodes} nodes are too few"
            return Decision(None, reason, take=take, release=give, save_first=True)
        reason = f"switches to {nodes} nodes at a boundary"
        return Decision(plan.layout, reason, stages=plan.stages, take=take, release=give, later=plan.later)

    def _leave_out(self, work: Workload, view: View, event: Slowed) -> Decision | None:
        """A slow node: replaced by a free one, or left out if the job is faster without it."""
        before = view.layout
        if before is None:
            return None
        nodes = len(view.held) - 1 + len(view.free)
        layout, _ = self.onto(work, before, nodes, view.running_s)
        if layout is None or layout.speed.step_s >= before.speed.step_s * event.factor:
            return None
        give = (event.node,)
        plan = self._carry_on(work, view, before.nodes - 1, before.detail.missing, give)
        reason = f"node {event.node} is {event.factor:.1f} × slow: goes on without it"
        return Decision(
            plan.layout,
            reason,
            stages=plan.stages,
            take=tuple(view.free),
            release=give,
            later=plan.later,
        )

    def _carry_on(
        self, work: Workload, view: View, in_use: int, missing: int, give: tuple[int, ...]
    ) -> CarryOn:
        """Run on the `in_use` nodes that are ready, `missing` replicas short, while the rest gets ready.

        Getting ready are processes that replace dead ones, and nodes that the job holds or takes but does not
        use yet. A further fault meanwhile starts that anew.
        """
        before = view.layout
        assert before is not None  # a job that does not run starts instead
        target = len(view.held) + len(view.free) - len(give)
        joins = missing > 0 or target > in_use
        ready_s = self.settings.start_s + work.state_bytes / spans(work, before) / work.node_bytes_s
        layout, stages = self.onto(work, before, in_use, ready_s if joins else view.running_s)
        if layout is not None and not joins:
            return CarryOn(layout, stages, None)
        after, more = self.onto(work, layout or before, target, view.running_s)
        if layout is None:  # it cannot run before the others are there
            return CarryOn(after, (Stage("start and join", ready_s), *more) if after else (), None)
        later = None if after is None else Later(ready_s, after, more)
        return CarryOn(short_of(work, layout, missing), stages, later)


@dataclass(frozen=True, slots=True)
class Cut:
    """How replicas are cut (None where only the speed is known) and how many lack a worker."""

    setting: Setting | None
    missing: int = 0


@dataclass(frozen=True, slots=True)
class CarryOn:
    """What runs now, for what all wait before it, and what follows when the others are ready."""

    layout: Layout | None
    stages: tuple[Stage, ...]
    later: Later | None


def replicas(layout: Layout) -> int:
    """Copies of the model; a node each where the cut is not known."""
    setting = layout.detail.setting
    return max(1, layout.nodes) if setting is None else int(setting.data)


def spans(work: Workload, layout: Layout) -> float:
    """Nodes of one replica, 1 at least."""
    setting = layout.detail.setting
    return 1.0 if setting is None else max(1.0, setting.tensor * setting.pipeline / work.gpus_per_node)


def short_of(work: Workload, whole: Layout, missing: int) -> Layout:
    """`whole` with `missing` replicas less on the same nodes: the others compute their micro-batches too.

    With m micro-batches a replica and p stages a step takes (m + p − 1) times a stage's time; m grows to
    ceil(B / ((d − missing)·micro-batch)). Where the cut is not known the work is spread evenly.
    """
    if missing == 0:
        return whole
    setting, now, count = whole.detail.setting, whole.speed, replicas(whole)
    live = max(1, count - missing)
    gpus = max(1, now.gpus * live // count)
    slower = count / live
    if setting is not None:
        share = [math.ceil(work.batch / (data * setting.micro_batch)) for data in (count, live)]
        slower = (share[1] + setting.pipeline - 1) / (share[0] + setting.pipeline - 1)
    step_s = now.step_s * slower
    fair_s = min(step_s, now.step_s * now.gpus / gpus)
    detail = replace(whole.detail, missing=missing)
    return replace(whole, speed=speed(gpus, fair_s, fair_s, step_s), detail=detail)

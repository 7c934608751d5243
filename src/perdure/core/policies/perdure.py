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
from dataclasses import replace
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
from perdure.core.policies.common import Settings, plain_layout
from perdure.core.policies.work import Workload

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
        """The best parallel setting on `nodes` nodes."""
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes)
        return plain_layout(work, nodes)

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        match event:
            case Fault(severity=3):
                return self._again(view, event)
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

    def _again(self, view: View, fault: Fault) -> Decision:
        """SEV3: the same members in a new generation, every leaf kept."""
        if view.layout is None:
            return Decision(None, "waits for nodes")
        regroup = Stage("regroup", self.settings.regroup_s)
        detect_s = self.detect_s(fault, view.layout.speed.step_s)
        return Decision(view.layout, "regroups in place", detect_s, (regroup,))

    def _heal(self, work: Workload, view: View, fault: Fault) -> Decision:
        """SEV2 and SEV1: go on without the lost worker or nodes; replacements join in the background."""
        before = view.layout
        if before is None:
            return self._switch(work, view, ()) or Decision(None, "waits for nodes")
        detect_s = self.detect_s(fault, before.speed.step_s)
        replicas = work.replicas(before.nodes)
        gone = 1 if fault.severity == 2 else -(-len(fault.nodes) // work.replica_nodes(before.nodes))
        if gone >= replicas:
            return self._restore(work, view, fault, detect_s)
        if fault.severity == 2:
            return self._heal_worker(work, before, detect_s, gone / replicas)
        return self._heal_nodes(work, view, before, detect_s, gone / replicas)

    def _heal_worker(self, work: Workload, before: Layout, detect_s: float, share: float) -> Decision:
        """One replica less until the worker's replacement on its node has the state."""
        less, full = self._one_less(work, before.nodes), self.layout(work, before.nodes)
        stages = (Stage("regroup", self.settings.regroup_s),)
        later = None if full is None else Later(self._ready_s(work, before.nodes), full)
        reason = "the others go on; the worker's replacement joins at a boundary"
        return Decision(less or before, reason, detect_s, stages, Lost.SHARE, share, later=later)

    def _heal_nodes(
        self, work: Workload, view: View, before: Layout, detect_s: float, share: float
    ) -> Decision:
        """Fewer nodes at once; those that were dealt in their place join when they have the state."""
        take, give = tuple(view.free), view.give
        nodes = len(view.held) - len(give)
        layout, full = self.layout(work, nodes), self.layout(work, nodes + len(take))
        decision = Decision(None, f"{nodes} nodes are too few", detect_s, (), Lost.SHARE, share, take, give)
        if full is None:
            return decision
        if layout is None:  # it cannot run before the replacement is there
            ready = Stage("start and join", self._ready_s(work, nodes + len(take)))
            stages = (*self._stages(work, before, full), ready)
            return replace(decision, layout=full, reason="waits for standbys", stages=stages)
        reason = f"goes on with {nodes} nodes"
        decision = replace(decision, layout=layout, reason=reason, stages=self._stages(work, before, layout))
        if not take:
            return decision
        later = Later(self._ready_s(work, full.nodes), full, self._cut_anew(work, layout, full))
        return replace(decision, reason=f"{reason}, {len(take)} join", later=later)

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
        layout = self.layout(work, nodes)
        if layout is None:
            reason = f"{nodes} nodes are too few"
            return Decision(None, reason, take=take, release=give, save_first=before is not None)
        if before is None:
            stages = (Stage("start", self.settings.start_s), Stage("load", read_bytes=work.state_bytes))
            return Decision(layout, "starts", stages=stages, take=take, release=give)
        reason = f"switches to {nodes} nodes at a boundary"
        if not take:
            return Decision(layout, reason, stages=self._cut_anew(work, before, layout), release=give)
        return self._join(work, view, layout, give, reason)

    def _join(
        self, work: Workload, view: View, layout: Layout, give: tuple[int, ...], reason: str
    ) -> Decision:
        """Nodes of `view.free` join; until they are ready the job goes on, on what `give` leaves it."""
        before = view.layout
        assert before is not None  # a job that does not run starts instead
        meanwhile = self.layout(work, len(view.held) - len(give)) if give else before
        ready_s, take = self._ready_s(work, layout.nodes), tuple(view.free)
        if meanwhile is None:
            waits = (Stage("start and join", ready_s), *self._cut_anew(work, before, layout))
            return Decision(layout, reason, stages=waits, take=take, release=give)
        later = Later(ready_s, layout, self._cut_anew(work, meanwhile, layout))
        stages = self._cut_anew(work, before, meanwhile)
        return Decision(meanwhile, reason, stages=stages, take=take, release=give, later=later)

    def _leave_out(self, work: Workload, view: View, event: Slowed) -> Decision | None:
        """A slow node: replaced by a free one, or left out if the job is faster without it."""
        before = view.layout
        if before is None:
            return None
        nodes = len(view.held) - 1 + len(view.free)
        layout = self.layout(work, nodes)
        if layout is None or layout.speed.step_s >= before.speed.step_s * event.factor:
            return None
        reason = f"node {event.node} is {event.factor:.1f} × slow: goes on without it"
        if view.free:
            return self._join(work, view, layout, (event.node,), reason)
        return Decision(layout, reason, stages=self._cut_anew(work, before, layout), release=(event.node,))

    def _one_less(self, work: Workload, nodes: int) -> Layout | None:
        """`nodes` nodes with one replica less: the others compute its micro-batches too.

        With m micro-batches a replica and p stages a step takes (m + p − 1) times a stage's time; m grows to
        ceil(B / ((d − 1)·micro-batch)). None if the cut is not known.
        """
        setting, full = work.setting(nodes), self.layout(work, nodes)
        if setting is None or full is None or setting.data < 2:
            return None
        share = [
            math.ceil(work.batch / (data * setting.micro_batch)) for data in (setting.data, setting.data - 1)
        ]
        slower = (share[1] + setting.pipeline - 1) / (share[0] + setting.pipeline - 1)
        gpus = full.speed.gpus - setting.tensor * setting.pipeline
        step_s = full.speed.step_s * slower
        fair_s = full.speed.step_s * full.speed.gpus / gpus
        return Layout(nodes, speed(gpus, min(fair_s, step_s), min(fair_s, step_s), step_s))

    def _ready_s(self, work: Workload, nodes: int) -> float:
        """Until a new process has started and has its node's share of one replica from live replicas."""
        return self.settings.start_s + work.state_bytes / work.replica_nodes(nodes) / work.node_bytes_s

    def _cut_anew(self, work: Workload, before: Layout, after: Layout) -> tuple[Stage, ...]:
        """Nothing if every replica stays cut as it is; else the state is dealt out anew while all wait."""
        old, new = work.setting(before.nodes), work.setting(after.nodes)
        if old is None or new is None or (old.tensor, old.pipeline) == (new.tensor, new.pipeline):
            return ()
        move_s = work.state_bytes / min(before.nodes, after.nodes) / work.node_bytes_s
        return (Stage("cut anew", self.settings.recut_s), Stage("move state", move_s))

    def _stages(self, work: Workload, before: Layout, after: Layout) -> tuple[Stage, ...]:
        """What survivors do after an unplanned loss: form a group again, and cut anew if they must."""
        return (Stage("regroup", self.settings.regroup_s), *self._cut_anew(work, before, after))

"""ReCycle: a dead worker's micro-batches go to the same stage of the other pipelines, into their bubbles.

(Gandhi et al., SOSP'24.) There are D pipelines of P stages. When a stage of some pipeline has lost its
worker, the live workers of that stage (its peers, which hold the same parameters) share its micro-batches.

1. Backward is split into its part for inputs, which the previous stage waits for, and its part for weights,
   which is deferred into idle slots; optimizer steps are staggered, so that the bubble at a step's end
   serves too.
2. With l live peers the busiest stage works on ceil(D·M / l) micro-batches instead of M. It has all of a
   step's bubble for the surplus but the time in which the first micro-batch has not yet reached it:

       step = max((M + P − 1)·t,  ceil(D·M / l)·t + (P − 1)·t_forward) + tail

3. Needs one live peer for every stage. Without one everything restarts from the checkpoint, on as many whole
   pipelines as the nodes allow.
4. A node that comes back fills a hole; its state is copied from a peer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from perdure.core.policies.base import (
    Decision,
    Event,
    Fault,
    Layout,
    Lost,
    Offered,
    Saving,
    Stage,
    View,
    assumed,
)
from perdure.core.policies.common import Detection, layout_of, plain_layout
from perdure.core.policies.pipeline import Grid, grids
from perdure.core.policies.places import Places
from perdure.core.policies.work import Workload

HOLE = -1


@dataclass(frozen=True, slots=True)
class Slots:
    """Who works where: place d·P + s is stage s of pipeline d.

    `holes` are the places that are empty, in order; `extra` nodes wait.
    """

    places: Places
    depth: int
    data: int
    extra: tuple[int, ...] = ()
    holes: tuple[int, ...] = ()

    @property
    def peers_least(self) -> int:
        """The live workers of the stage that has the fewest."""
        missing = Counter(place % self.depth for place in self.holes)
        return self.data - max(missing.values(), default=0)

    @property
    def size(self) -> int:
        """All places."""
        return self.data * self.depth

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node in each place, or `HOLE`. O(nodes)."""
        found = [HOLE] * self.size
        for node, place in self.places.items():
            found[place] = node
        return tuple(found)

    @property
    def live(self) -> tuple[int, ...]:
        """All nodes, those that wait last. O(nodes)."""
        return tuple(node for node in self.nodes if node != HOLE) + self.extra

    def without(self, lost: frozenset[int]) -> Slots:
        """A hole wherever a lost node was; waiting nodes fill holes."""
        extra = tuple(node for node in self.extra if node not in lost)
        found = {node: self.places.get(node) for node in lost}
        gone = sorted(place for place in found.values() if place is not None)
        if not gone:
            return replace(self, extra=extra)
        places = self.places.changed((node, None) for node in found)
        holes = tuple(sorted((*self.holes, *gone)))
        return replace(self, places=places, extra=extra, holes=holes).filled()

    def filled(self, more: tuple[int, ...] = ()) -> Slots:
        """Waiting nodes, `more` first, put into holes, the first hole first."""
        waiting = (*more, *self.extra)
        count = min(len(waiting), len(self.holes))
        if count == 0:
            return replace(self, extra=waiting)
        places = self.places.changed(zip(waiting[:count], self.holes[:count], strict=True))
        return replace(self, places=places, extra=waiting[count:], holes=self.holes[count:])


def laid_out(nodes: Sequence[int], depth: int) -> Slots:
    """Whole pipelines of `depth` of `nodes`, in order; what is left waits."""
    count = len(nodes) // depth * depth
    places = Places({node: place for place, node in enumerate(nodes[:count])})
    return Slots(places, depth, count // depth, tuple(nodes[count:]))


def rerouted_step_s(grid: Grid, peers_least: int) -> float:
    """The step when the stage with the fewest live workers has `peers_least` of `grid.data`."""
    busiest = math.ceil(grid.data * grid.micro_batches / peers_least)
    forward_s = grid.forward_s
    return max(grid.step_s, busiest * grid.stage_s + (grid.depth - 1) * forward_s + grid.tail_s)


class RecycleSettings(Detection, frozen=True):
    """No figure is published for the change of schedules; the copy of a stage's state is computed."""

    reroute_s: Annotated[float, assumed("to switch all workers to the new schedule, s", 1, 30, "worse")] = 5.0
    rejoin_s: Annotated[float, assumed("until a failed process is back on its node, s", 30, 600, "worse")] = (
        120.0
    )
    restart_s: Annotated[float, assumed("to start again from a checkpoint, s", 76, 701, "worse")] = 120.0
    save_every_s: Annotated[float, assumed("between checkpoints, s", 600, 14400, "either", above=0)] = 3600.0
    snapshot_s: Annotated[
        float, assumed("stall of one checkpoint, written in the background, s", 0, 60, "worse")
    ] = 5.0


class Recycle:
    """Adaptive pipelining."""

    name: ClassVar[str] = "recycle"
    deals: ClassVar[Literal["queue", "planner"]] = "queue"

    def __init__(self, settings: RecycleSettings) -> None:
        self.settings = settings
        self._grids: dict[tuple[str, int, int], Grid | None] = {}
        self._depths: dict[tuple[str, int], int] = {}

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        depth = self.depth(work, len(nodes))
        if depth is None:
            return None
        return self._layout(work, laid_out(nodes, depth))

    def depth(self, work: Workload, nodes: int) -> int | None:
        """The depth with the shortest intact step, two pipelines or more if there are nodes for two.

        With one pipeline no stage has a peer. None if no depth fits the memory.
        """
        if work.name in self.settings.measured or work.profile is None:
            return 1 if nodes >= work.nodes_min else None
        key = (work.name, nodes)
        if key not in self._depths:
            found: dict[int, float] = {}
            for depth in range(1, min(nodes, work.profile.layers) + 1):
                if work.profile.layers % depth == 0 and (depth <= nodes // 2 or not found):
                    grid = self._grid(work, nodes // depth, depth)
                    if grid is not None:
                        found[depth] = grid.step_s
            self._depths[key] = min(found, key=found.__getitem__, default=0)
        return self._depths[key] or None

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        if isinstance(event, Fault):
            return self._lose(work, view, event)
        if isinstance(event, Offered):
            return self._offer(work, view)
        return None

    def saving(self, work: Workload, layout: Layout) -> Saving:
        settings = self.settings
        return Saving(
            every_s=settings.save_every_s, stall_s=settings.snapshot_s, write_bytes=work.state_bytes
        )

    def _lose(self, work: Workload, view: View, fault: Fault) -> Decision:
        settings = self.settings
        detect_s = settings.detect_s(fault)
        lost = frozenset(fault.nodes)
        returning = () if fault.severity == 1 else tuple((node, settings.rejoin_s) for node in fault.nodes)
        if view.layout is None:
            return Decision(None, "waits for more nodes", detect_s, returning=returning)
        take = tuple(view.free[: max(0, view.nominal - len(view.held) + len(returning))])
        before: Slots = view.layout.detail
        after = replace(before, extra=before.extra + take).without(lost)
        placed = len(lost.union(before.extra, take)) - len(lost) > len(after.extra)
        if after.peers_least > 0:
            stages = (Stage("reroute", settings.reroute_s), self._copy(work, after, placed))
            layout = self._layout(work, after)
            reason = f"micro-batches go to {after.peers_least} of {after.data} peers"
            return Decision(layout, reason, detect_s, stages, Lost.STEP, take=take, returning=returning)
        nodes = after.live
        layout = self.begin(work, nodes)
        reason = "a stage has no live peer: restarts from the checkpoint"
        return Decision(
            layout,
            reason if layout else f"{reason} once there are more nodes",
            detect_s,
            (Stage("restart", settings.restart_s), Stage("load", read_bytes=work.state_bytes))
            if layout
            else (),
            Lost.CHECKPOINT,
            take=take,
            returning=returning,
        )

    def _offer(self, work: Workload, view: View) -> Decision | None:
        take = tuple(view.free[: max(0, view.nominal - len(view.held))])
        settings = self.settings
        if view.layout is None:
            layout = self.begin(work, (*view.held, *take))
            if layout is None:
                return Decision(None, "waits for more nodes", take=take) if take else None
            stages = (Stage("restart", settings.restart_s), Stage("load", read_bytes=work.state_bytes))
            return Decision(layout, "enough nodes again", stages=stages, take=take)
        if not take:
            return None
        before: Slots = view.layout.detail
        after = before.filled(take)
        if len(after.extra) >= after.depth:  # whole pipelines more: a new grid, its state copied from peers
            layout = self.begin(work, after.live)
            reason = "builds further pipelines"
        else:
            layout = self._layout(work, after)
            reason = f"{len(take)} nodes fill holes or wait"
        placed = len(before.holes) > len(after.holes) or len(after.extra) >= after.depth
        stages = (Stage("reroute", settings.reroute_s), self._copy(work, after, placed))
        return Decision(layout, reason, stages=stages, take=take)

    def _copy(self, work: Workload, slots: Slots, placed: bool) -> Stage:
        """State that nodes new in their place get from a peer: one stage each, all at the same time."""
        return Stage("copy", work.state_bytes / slots.depth / work.node_bytes_s if placed else 0.0)

    def _layout(self, work: Workload, slots: Slots) -> Layout | None:
        live = slots.size - len(slots.holes)
        least = slots.peers_least
        gpus = live * work.gpus_per_node
        if live < work.nodes_min:
            return None
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, live, slots)
        if work.profile is None:
            intact = plain_layout(work, slots.size)
            if intact is None:
                return None
            step_s = intact.speed.step_s * slots.data / least
            return layout_of(work, live, gpus, intact.speed.step_s * slots.size / live, step_s, slots)
        grid = self._grid(work, slots.data, slots.depth)
        if grid is None:
            return None
        # What fewer GPUs must take anyway is no degradation: the intact step is stretched to the live ones.
        healthy_s = grid.step_s * slots.size / live
        step_s = rerouted_step_s(grid, least)
        return layout_of(work, live, gpus, min(healthy_s, step_s), step_s, slots)

    def _grid(self, work: Workload, data: int, depth: int) -> Grid | None:
        key = (work.name, data, depth)
        if key not in self._grids:
            assert work.profile is not None  # asked for modelled jobs only
            fitting = grids(work.profile, data * depth, depth, 1.0)
            self._grids[key] = min(fitting, key=lambda grid: grid.step_s, default=None)
        return self._grids[key]

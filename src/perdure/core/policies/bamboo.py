"""Bamboo: every node also computes its successor's forward pass, and takes its stage over when it dies.

(Thorpe et al., NSDI'23; its public code.) In a pipeline of P nodes node s holds stage s and a shadow of stage
s+1 (mod P), brought up to date every step. The shadow's forward pass runs in the pipeline's bubble as far as
that reaches; what is left of it slows every step.

1. Node s+1 dies: node s replays the backward passes of the lost stage from the failed step on (their forward
   passes it has) and goes on with two stages, at the pace of both. No step is lost. Stage s+2's shadow
   died with node s+1, and stage s+1 now has none.
2. Fatal: a stage whose holder dies has no live shadow: two adjacent nodes, or a node that already stands
   in for its successor. Then everything restarts from the checkpoint.
3. At a step's boundary it reconfigures when a node holds more than two stages, when as many nodes wait as are
   doubled, when a further pipeline can be built, or when the nodes whose loss would be fatal (two for each
   doubled one) exceed 5 % of the active ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

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
    speed,
)
from perdure.core.policies.common import Detection, ideal_step_s, plain_layout
from perdure.core.policies.pipeline import Grid, grids
from perdure.core.policies.places import Places, spliced
from perdure.core.policies.work import Workload

AT_RISK = 0.05


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Who holds each stage and who its shadow (None where it was lost); the same length.

    `doubled` nodes hold two stages or more, the busiest `stages_most`.
    """

    primary: tuple[int, ...]
    shadow: tuple[int | None, ...]
    doubled: int = field(default=0, compare=False)
    stages_most: int = field(default=1, compare=False)

    @property
    def intact(self) -> bool:
        """Every stage has a holder of its own and a shadow."""
        return self.doubled == 0 and None not in self.shadow


def new_pipeline(nodes: Sequence[int]) -> Pipeline:
    """Node s has stage s and the shadow of stage s+1."""
    return Pipeline(tuple(nodes), (nodes[-1], *nodes[:-1]))


def take_over(pipeline: Pipeline, lost: frozenset[int]) -> Pipeline | None:
    """The pipeline without `lost`, shadows in the place of lost holders; None if a stage is gone (fatal)."""
    if lost.isdisjoint(pipeline.primary) and lost.isdisjoint(pipeline.shadow):
        return pipeline
    primary = list(pipeline.primary)
    shadow = [None if node in lost else node for node in pipeline.shadow]
    for stage, node in enumerate(primary):
        if node in lost:
            heir = shadow[stage]
            if heir is None:
                return None
            primary[stage], shadow[stage] = heir, None
    held = Counter(primary).values()
    return Pipeline(tuple(primary), tuple(shadow), sum(count > 1 for count in held), max(held))


def reconfigures(broken: Sequence[Pipeline], count: int, waiting: int, depth: int) -> str | None:
    """Why the pipelines should be built anew at the next boundary, or None.

    `count` are all pipelines; those of them that are not intact are `broken`.
    """
    doubled = sum(pipeline.doubled for pipeline in broken)
    active = count * depth - doubled
    if any(pipeline.stages_most > 2 for pipeline in broken):
        return "a node holds more than two stages"
    if doubled and waiting >= doubled:
        return f"{waiting} nodes wait, {doubled} are doubled up"
    if doubled and 2 * doubled / active > AT_RISK:
        return f"the loss of any of {2 * doubled} of {active} nodes would be fatal"
    if (active + waiting) // depth > count:
        return "a further pipeline can be built"
    return None


@dataclass(frozen=True, slots=True)
class BambooLayout:
    """The pipelines of `depth` nodes, the nodes that wait, and the grid of the intact job.

    `places` are the pipelines of nodes, `broken` those pipelines that are not intact.
    """

    pipelines: tuple[Pipeline, ...]
    depth: int
    places: Places
    waiting: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    grid: Grid | None = None

    @property
    def not_intact(self) -> tuple[Pipeline, ...]:
        return tuple(self.pipelines[index] for index in self.broken)

    def without(self, lost: frozenset[int]) -> BambooLayout | None:
        """Shadows in the place of lost nodes; None if a stage is gone (fatal)."""
        hit = {index for node in lost if (index := self.places.get(node)) is not None}
        pipelines = list(self.pipelines)
        for index in hit:
            after = take_over(pipelines[index], lost)
            if after is None:
                return None
            pipelines[index] = after
        return replace(
            self,
            pipelines=tuple(pipelines),
            places=self.places.changed((node, None) for node in lost) if hit else self.places,
            waiting=tuple(node for node in self.waiting if node not in lost),
            broken=tuple(sorted(hit.union(self.broken))),
        )

    def rebuilt(self) -> BambooLayout:
        """New pipelines of the nodes of broken ones and of those that wait; intact ones stay."""
        nodes = (*_nodes(self.not_intact), *self.waiting)
        whole = len(nodes) // self.depth * self.depth
        new = [new_pipeline(nodes[start : start + self.depth]) for start in range(0, whole, self.depth)]
        pipelines, placed = spliced(self.pipelines, self.broken, new)
        changes: list[tuple[int, int | None]] = [(node, None) for node in nodes[whole:]]
        changes += [(node, index) for pipeline, index in placed for node in pipeline.primary]
        places = self.places.changed(changes)
        return replace(self, pipelines=pipelines, places=places, waiting=nodes[whole:], broken=())


def redundant_s(grid: Grid) -> float:
    """What the shadows' forward passes add to a step beyond the bubble that they fill."""
    return max(0.0, grid.micro_batches * grid.forward_s - (grid.depth - 1) * grid.stage_s)


class BambooSettings(Detection, frozen=True):
    """Published: 1.5 × memory; a local reconfiguration of 76–450 s (BERT-large … 6.7B, by Oobleck)."""

    memory_factor: Annotated[
        float, assumed("memory with shadows, in terms of that without", 1.3, 2.0, "worse", above=0)
    ] = 1.5
    reconfigure_s: Annotated[float, assumed("to build the pipelines anew, s", 76, 450, "worse")] = 100.0
    restart_s: Annotated[float, assumed("to start again from a checkpoint, s", 76, 701, "worse")] = 120.0
    rejoin_s: Annotated[float, assumed("until a failed process is back on its node, s", 30, 600, "worse")] = (
        120.0
    )
    save_every_s: Annotated[float, assumed("between checkpoints, s", 600, 7200, "either", above=0)] = 1800.0
    snapshot_s: Annotated[
        float, assumed("stall of one checkpoint, written in the background, s", 0, 60, "worse")
    ] = 5.0
    effective_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Measured share of the time that is not redundant work; it rules instead of the model of the bubble."""
    depth: dict[str, Annotated[int, Meta(ge=2)]] = msgspec.field(default_factory=dict)
    """Nodes of a pipeline, by job; otherwise the least that the memory allows, two at least."""


class Bamboo:
    """Redundant computation."""

    name: ClassVar[str] = "bamboo"
    deals: ClassVar[Literal["queue", "planner"]] = "queue"

    def __init__(self, settings: BambooSettings) -> None:
        self.settings = settings
        self._depths: dict[str, int] = {}
        self._known: dict[tuple[str, int], _Steps | None] = {}

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        depth = self.depth(work)
        return self._built(work, BambooLayout((), depth, Places({}), waiting=tuple(nodes)).rebuilt())

    def _built(self, work: Workload, detail: BambooLayout) -> Layout | None:
        """The layout of `detail`, or None if it cannot run."""
        count = len(detail.pipelines)
        nodes = count * detail.depth + len(detail.waiting)
        if count == 0 or nodes < work.nodes_min or self._steps(work, count, detail.depth) is None:
            return None
        return self._layout(work, detail)

    def depth(self, work: Workload) -> int:
        """Nodes of one pipeline: two at least, and the fewest whose memory holds stages and shadows."""
        if work.name not in self._depths:
            self._depths[work.name] = self._find_depth(work)
        return self._depths[work.name]

    def _find_depth(self, work: Workload) -> int:
        if work.name in self.settings.depth or work.profile is None:
            return self.settings.depth.get(work.name, 2)
        profile, copies = work.profile, self.settings.memory_factor
        node = profile.gpu_bytes * work.gpus_per_node
        least = max(2, math.ceil(copies * profile.training_bytes / node))
        fitting = (
            depth for depth in range(least, profile.layers + 1) if any(grids(profile, depth, depth, copies))
        )
        return next(fitting, least)

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
        detect_s = self.settings.detect_s(fault)
        lost = frozenset(fault.nodes)
        returning = (
            () if fault.severity == 1 else tuple((node, self.settings.rejoin_s) for node in fault.nodes)
        )
        if view.layout is None:
            return Decision(None, "waits for more nodes", detect_s, returning=returning)
        now: BambooLayout = view.layout.detail
        take = tuple(view.free[: max(0, view.nominal - len(view.held) + len(returning))])
        decision = Decision(None, "", detect_s, take=take, returning=returning)
        more = replace(now, waiting=now.waiting + take)
        after = more.without(lost)
        if after is None:
            return self._restart(work, more, lost, decision)
        hit = len(set(after.broken).difference(now.broken)) or len(lost.difference(now.waiting))
        replay = Stage("replay", self._replay_s(now, fault.step_done) if hit else 0.0)
        reason = f"the shadows of {hit} pipelines take over" if hit else "only waiting nodes were lost"
        decision = replace(decision, reason=reason, stages=(replay,))
        return self._settle(work, after, decision)

    def _replay_s(self, now: BambooLayout, step_done: float) -> float:
        """The lost stage's backward passes of the step so far; its forward passes were computed all along."""
        if now.grid is None:
            return 0.0
        return step_done * now.grid.micro_batches * (now.grid.recompute_s + now.grid.backward_s)

    def _settle(self, work: Workload, now: BambooLayout, decision: Decision) -> Decision:
        """Go on as it is, or with new pipelines from the next boundary on, which loses nothing."""
        why = reconfigures(now.not_intact, len(now.pipelines), len(now.waiting), now.depth)
        if why is None:
            return replace(decision, layout=self._layout(work, now))
        layout = self._built(work, now.rebuilt())
        stages = (*decision.stages, Stage("reconfiguration", self.settings.reconfigure_s))
        reason = f"{decision.reason}; {why}".removeprefix("; ")
        if layout is None:
            return replace(decision, layout=None, reason=f"{reason}, but too few nodes are left")
        return replace(decision, layout=layout, reason=f"{reason}: reconfigures", stages=stages)

    def _restart(
        self, work: Workload, now: BambooLayout, lost: frozenset[int], decision: Decision
    ) -> Decision:
        """Fatal: from the checkpoint with all nodes that are left."""
        nodes = tuple(node for node in (*_nodes(now.pipelines), *now.waiting) if node not in lost)
        layout = self.begin(work, nodes)
        stages = (Stage("restart", self.settings.restart_s), Stage("load", read_bytes=work.state_bytes))
        reason = "fatal: a stage and its shadow are lost, restarts from the checkpoint"
        if layout is None:
            return replace(decision, reason=f"{reason} once there are more nodes", lost=Lost.CHECKPOINT)
        return replace(decision, layout=layout, reason=reason, stages=stages, lost=Lost.CHECKPOINT)

    def _offer(self, work: Workload, view: View) -> Decision | None:
        take = tuple(view.free[: max(0, view.nominal - len(view.held))])
        if view.layout is None:
            layout = self.begin(work, (*view.held, *take))
            if layout is None:
                return Decision(None, "waits for more nodes", take=take) if take else None
            stages = (Stage("restart", self.settings.restart_s), Stage("load", read_bytes=work.state_bytes))
            return Decision(layout, "enough nodes again", stages=stages, take=take)
        if not take:
            return None
        now: BambooLayout = view.layout.detail
        more = replace(now, waiting=now.waiting + take)
        return self._settle(work, more, Decision(None, "", take=take))

    def _layout(self, work: Workload, detail: BambooLayout) -> Layout:
        """The layout of `detail`, whose grid is filled in. Raises `ValueError` if its pipelines cannot
        run.
        """
        steps = self._steps(work, len(detail.pipelines), detail.depth)
        if steps is None:
            raise ValueError(
                f"{len(detail.pipelines)} pipelines of {detail.depth} nodes cannot run {work.name}"
            )
        broken = detail.not_intact
        nodes = len(detail.pipelines) * detail.depth - sum(pipeline.doubled for pipeline in broken)
        most = max((pipeline.stages_most for pipeline in broken), default=1)
        slower = doubled_factor(steps.grid, most)
        gpus = nodes * work.gpus_per_node
        share = speed(gpus, steps.ideal_s, steps.healthy_s, steps.healthy_s * slower)
        return Layout(nodes, share, replace(detail, grid=steps.grid))

    def _steps(self, work: Workload, count: int, depth: int) -> _Steps | None:
        key = (work.name, count)
        if key not in self._known:
            self._known[key] = self._find_steps(work, count, depth)
        return self._known[key]

    def _find_steps(self, work: Workload, count: int, depth: int) -> _Steps | None:
        """The steps of `count` intact pipelines; None if they do not fit the memory."""
        nodes, share = count * depth, self.settings.effective_share
        if work.name in self.settings.measured or work.profile is None:
            known = work.name in self.settings.measured
            plain = self.settings.measured_layout(work, nodes) if known else plain_layout(work, nodes)
            if plain is None:
                return None
            return _Steps(plain.speed.step_s, plain.speed.step_s / (share or 1.0), None)
        fitting = grids(work.profile, nodes, depth, self.settings.memory_factor)
        grid = min(fitting, key=lambda grid: grid.step_s + redundant_s(grid), default=None)
        if grid is None:
            return None
        healthy_s = grid.step_s / share if share else grid.step_s + redundant_s(grid)
        return _Steps(ideal_step_s(work, nodes, nodes * work.gpus_per_node, healthy_s), healthy_s, grid)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The best step on as many GPUs, Bamboo's own while nothing is broken, and its grid where it is
    modelled.
    """

    ideal_s: float
    healthy_s: float
    grid: Grid | None


def doubled_factor(grid: Grid | None, most: int) -> float:
    """How much longer a step takes when some node works on `most` stages."""
    if most == 1 or grid is None:
        return float(most)
    step_s = ((grid.micro_batches - 1) * most + grid.depth) * grid.stage_s + grid.tail_s
    return max(1.0, step_s / grid.step_s)


def _nodes(pipelines: Iterable[Pipeline]) -> tuple[int, ...]:
    """The live nodes of `pipelines` in the order of their stages, each once."""
    return tuple(dict.fromkeys(node for pipeline in pipelines for node in pipeline.primary))

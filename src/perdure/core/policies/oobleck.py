"""Oobleck: pipelines of different sizes from templates; on a loss the survivors form pipelines again.

(Jang et al., SOSP'23; its public code.)

1. n0 = ceil((6·parameters + largest activation) / memory of a node) nodes are the least that a pipeline
   needs. Templates exist for n0 … N − f·n0 nodes (`oobleck_templates`).
2. Instantiation: of all multisets of template sizes with sum N and at least f+1 pipelines the one with the
   shortest step: max over pipelines of the latency of its share of the batch, plus the all-reduce
   (`oobleck_plan`). Every pipeline holds the whole model, so any f losses leave a live copy of every layer.
3. On a loss a pipeline that keeps n0 nodes goes on with a smaller template, one that does not borrows, or is
   merged. Missing layers are copied, parameters and optimizer state, from any live holder. The interrupted
   step is lost. If some layer has no live holder, or fewer than n0 nodes are left, the checkpoint is needed.
4. Nodes that come back: the pipelines are instantiated anew at a boundary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
)
from perdure.core.policies.common import Detection, layout_of
from perdure.core.policies.oobleck_plan import (
    BestRates,
    Pipelines,
    Restart,
    fetches,
    makespan,
    partitions,
    reconfigure,
)
from perdure.core.policies.oobleck_templates import Template, Templates
from perdure.core.policies.places import Places, spliced
from perdure.core.policies.work import Profile, Workload

Sizes = tuple[tuple[int, int], ...]
"""(size, how many pipelines of it), in order."""
ALL_MATTER = 32
"""Pipelines up to which all are looked at when one is hit."""
LISTED_NODES = 24
"""Up to so many nodes every multiset of sizes is compared; beyond it their rates decide."""


class OobleckSettings(Detection, frozen=True):
    """Published: a reconfiguration of 2–10 s (BERT-large … 6.7B), copying included."""

    tolerates: Annotated[int, Meta(ge=1)] = 1
    """f: how many losses at once must be survived without a restart."""
    state_factor: Annotated[
        float,
        assumed("memory of training in terms of that of the 16-bit parameters", 6, 9, "either", above=0),
    ] = 6.0
    regroup_s: Annotated[
        float, assumed("to agree on the new pipelines and connect them, s", 1, 10, "worse")
    ] = 2.0
    reconfigure_s: Annotated[float, Meta(ge=0)] | None = None
    """Measured time of a whole reconfiguration; it rules instead of `regroup_s` and the computed copy."""
    restart_s: Annotated[float, assumed("to start again from a checkpoint, s", 76, 701, "worse")] = 120.0
    rejoin_s: Annotated[float, assumed("until a failed process is back on its node, s", 30, 600, "worse")] = (
        120.0
    )
    save_every_s: Annotated[float, assumed("between checkpoints, s", 600, 14400, "either", above=0)] = 3600.0
    snapshot_s: Annotated[
        float, assumed("stall of one checkpoint, written in the background, s", 0, 60, "worse")
    ] = 5.0
    nodes_least: dict[str, Annotated[int, Meta(ge=1)]] = msgspec.field(default_factory=dict)
    """n0 by job, where it is not to be computed."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What Oobleck prepares for one job: n0, its templates, the micro-batch and how many make a step."""

    least: int
    templates: Templates | None
    micro_batch: int
    micro_batches: int
    layers: int


class Oobleck:
    """Pipeline templates."""

    name: ClassVar[str] = "oobleck"
    deals: ClassVar[Literal["queue", "planner"]] = "queue"

    def __init__(self, settings: OobleckSettings) -> None:
        self.settings = settings
        self._kits: dict[str, Kit] = {}
        self._spans: dict[str, _Spans] = {}
        self._steps: dict[tuple[str, Sizes], float] = {}
        self._sizes: dict[tuple[str, int], tuple[int, ...] | None] = {}
        self._rates: dict[tuple[str, int], BestRates] = {}
        self._counted: dict[tuple[str, int], Sizes | None] = {}

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        chosen = self.instantiate(work, len(nodes))
        if chosen is None:
            return None
        pipelines, start = [], 0
        for size in chosen:
            pipelines.append(tuple(nodes[start : start + size]))
            start += size
        return self._layout(work, fleet(pipelines))

    def kit(self, work: Workload) -> Kit:
        """Prepared once for a job."""
        if work.name not in self._kits:
            self._kits[work.name] = self._prepare(work)
        return self._kits[work.name]

    def least_nodes(self, work: Workload) -> int:
        """n0."""
        if work.name in self.settings.nodes_least or work.profile is None:
            return self.settings.nodes_least.get(work.name, 1)
        profile = work.profile
        state = self.settings.state_factor * 2 * profile.model.parameters
        return math.ceil((state + profile.activation_bytes(1)) / (profile.gpu_bytes * work.gpus_per_node))

    def instantiate(self, work: Workload, nodes: int) -> tuple[int, ...] | None:
        """The sizes of the best pipelines on `nodes` nodes, or None if they make none."""
        key = (work.name, nodes)
        if key not in self._sizes:
            self._sizes[key] = self._choose(work, nodes)
        return self._sizes[key]

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        if isinstance(event, Fault):
            return self._lose(work, view, event)
        if isinstance(event, Offered):
            return self._offer(work, view)
        return None

    def _chosen(self, work: Workload, nodes: int) -> Sizes | None:
        """`instantiate`, counted by size."""
        key = (work.name, nodes)
        if key not in self._counted:
            found = self.instantiate(work, nodes)
            self._counted[key] = None if found is None else tuple(sorted(Counter(found).items()))
        return self._counted[key]

    def saving(self, work: Workload, layout: Layout) -> Saving:
        settings = self.settings
        return Saving(
            every_s=settings.save_every_s, stall_s=settings.snapshot_s, write_bytes=work.state_bytes
        )

    def _prepare(self, work: Workload) -> Kit:
        least = self.least_nodes(work)
        profile = work.profile
        if profile is None:
            return Kit(least, None, 1, work.batch, 1)
        share = profile.gpu_bytes * work.gpus_per_node * least - profile.training_bytes
        samples = 1
        while samples < 8 and share > 2 * samples * profile.activation_bytes(1) * profile.layers:
            samples *= 2
        return Kit(
            least=least,
            templates=Templates(_layer_seconds(profile, samples), work.gpus_per_node),
            micro_batch=samples,
            micro_batches=math.ceil(profile.batch / samples),
            layers=profile.layers,
        )

    def _choose(self, work: Workload, nodes: int) -> tuple[int, ...] | None:
        kit = self.kit(work)
        if nodes < kit.least:
            return None
        pipelines = min(self.settings.tolerates + 1, nodes // kit.least)
        largest = max(kit.least, nodes - (pipelines - 1) * kit.least)
        if kit.templates is None:  # known by its measured speed alone: the sizes do not matter
            even, more = divmod(nodes, nodes // kit.least)
            return tuple(even + (index < more) for index in range(nodes // kit.least))
        made = [size for size in range(kit.least, largest + 1) if kit.templates.template(size) is not None]
        if not made:
            return None
        if nodes <= LISTED_NODES:
            options = partitions(nodes, made, pipelines)
            return min(options, key=lambda chosen: self.step_s(work, chosen), default=None)
        key = (work.name, 1 << nodes.bit_length())
        if key not in self._rates:
            templates = [kit.templates.template(size) for size in made]
            rates = {found.nodes: 1 / found.slowest_s for found in templates if found is not None}
            self._rates[key] = BestRates(rates, key[1])
        return self._rates[key].members(nodes, pipelines)

    def step_s(self, work: Workload, chosen: Iterable[int]) -> float:
        """A step of pipelines of the sizes `chosen`; infinite if the batch is too small for them."""
        return self._step_of(work, tuple(sorted(Counter(chosen).items())))

    def _step_of(self, work: Workload, sizes: Sizes) -> float:
        key = (work.name, sizes)
        if key not in self._steps:
            self._steps[key] = self._find_step(work, sizes)
        return self._steps[key]

    def _find_step(self, work: Workload, sizes: Sizes) -> float:
        kit, profile = self.kit(work), work.profile
        if kit.templates is None or profile is None:
            return work.ideal_step_s(sum(size * count for size, count in sizes))
        groups, most = [], 0
        for size, count in sizes:
            template = kit.templates.template(size)
            if template is None:
                return math.inf
            groups.append((count, template.fill_s, template.slowest_s))
            most = max(most, *(len(template.layers_of(node)) for node in range(size)))
        latency_s = makespan(kit.micro_batches, groups)
        gradients = 2 * profile.parameters_per_layer * most
        members = sum(count for _, count in sizes)
        return latency_s + profile.all_reduce_s(gradients, members, work.node_bytes_s)

    def _lose(self, work: Workload, view: View, fault: Fault) -> Decision:
        settings = self.settings
        detect_s = settings.detect_s(fault)
        lost = frozenset(fault.nodes)
        returning = () if fault.severity == 1 else tuple((node, settings.rejoin_s) for node in fault.nodes)
        if view.layout is None:
            return Decision(None, "waits for more nodes", detect_s, returning=returning)
        decision = Decision(None, "", detect_s, returning=returning)
        now: Fleet = view.layout.detail
        kit, span = self.kit(work), self._layers_of(work)
        gaps = now.touched(lost, kit.least)
        part = tuple(now.pipelines[index] for index in gaps)
        # Where only a part is looked at there are pipelines enough besides.
        copies = settings.tolerates + 1 if len(gaps) == len(now.pipelines) else 1
        found = reconfigure(part, now.members(lost), kit.least, span, kit.layers, copies)
        if isinstance(found, Restart):
            return self._restart(work, now, lost, replace(decision, reason=found.reason))
        after = now.replaced(gaps, found.pipelines)
        layout = self._layout(work, after)
        if layout is None:
            reason = f"{len(after.pipelines)} pipelines cannot run it"
            return self._restart(work, now, lost, replace(decision, reason=reason))
        stages = self._reconfiguration(work, found.fetches)
        reason = "; ".join(found.steps[:3]) or "no pipeline was hit"
        return replace(decision, layout=layout, reason=reason, stages=stages, lost=Lost.STEP)

    def _restart(self, work: Workload, now: Fleet, lost: frozenset[int], decision: Decision) -> Decision:
        """From the checkpoint, on pipelines of all survivors."""
        nodes = tuple(node for pipeline in now.pipelines for node in pipeline if node not in lost)
        layout = self.begin(work, nodes)
        if layout is None:
            return replace(decision, reason=f"{decision.reason}: waits", lost=Lost.CHECKPOINT)
        reason = f"{decision.reason}: restarts from the checkpoint"
        return replace(decision, layout=layout, reason=reason, stages=self._fresh(work), lost=Lost.CHECKPOINT)

    def _offer(self, work: Workload, view: View) -> Decision | None:
        take = tuple(view.free[: max(0, view.nominal - len(view.held))])
        if view.layout is None:
            layout = self.begin(work, (*view.held, *take))
            if layout is None:
                return Decision(None, "waits for more nodes", take=take) if take else None
            return Decision(layout, "enough nodes again", stages=self._fresh(work), take=take)
        if not take:
            return None
        now: Fleet = view.layout.detail
        chosen = self._chosen(work, now.nodes + len(take))
        planned = None if chosen is None else self._layout(work, Fleet((), now.places, chosen))
        if chosen is None or planned is None or planned.speed.step_s >= view.layout.speed.step_s:
            return None
        gaps, new = now.dealt(take, chosen)
        layout = replace(planned, detail=now.replaced(gaps, new))
        part = tuple(now.pipelines[index] for index in gaps)
        stages = self._reconfiguration(work, fetches(part, tuple(new), self._layers_of(work)))
        reason = f"{len(take)} nodes more: {len(layout.detail.pipelines)} pipelines are instantiated"
        return Decision(layout, reason, stages=stages, take=take)

    def _reconfiguration(self, work: Workload, missing: dict[int, tuple[int, ...]]) -> tuple[Stage, ...]:
        """Regrouping, and the copy of what the node that lacks most lacks: all copy at the same time."""
        if self.settings.reconfigure_s is not None:
            return (Stage("reconfiguration", self.settings.reconfigure_s),)
        layers = max((len(wanted) for wanted in missing.values()), default=0)
        copied = work.state_bytes / self.kit(work).layers * layers
        return (Stage("regroup", self.settings.regroup_s), Stage("copy", copied / work.node_bytes_s))

    def _fresh(self, work: Workload) -> tuple[Stage, ...]:
        return (Stage("restart", self.settings.restart_s), Stage("load", read_bytes=work.state_bytes))

    def _layers_of(self, work: Workload) -> _Spans:
        if work.name not in self._spans:
            kit = self.kit(work)
            self._spans[work.name] = _Spans(kit.templates, kit.layers)
        return self._spans[work.name]

    def _layout(self, work: Workload, now: Fleet) -> Layout | None:
        nodes = now.nodes
        if nodes < work.nodes_min:
            return None
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes, now)
        step_s = self._step_of(work, now.sizes)
        if not math.isfinite(step_s):
            return None
        best = self._chosen(work, nodes)
        healthy_s = step_s if best is None else min(step_s, self._step_of(work, best))
        return layout_of(work, nodes, nodes * work.gpus_per_node, healthy_s, step_s, now)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The pipelines of a job, which of them each node is in, and how many there are of each size."""

    pipelines: Pipelines
    places: Places
    sizes: Sizes

    @property
    def nodes(self) -> int:
        """All nodes in pipelines."""
        return sum(size * count for size, count in self.sizes)

    def members(self, nodes: Iterable[int]) -> frozenset[int]:
        """Those of `nodes` that are in a pipeline."""
        return frozenset(node for node in nodes if self.places.get(node) is not None)

    def touched(self, lost: frozenset[int], least: int) -> tuple[int, ...]:
        """The pipelines that matter when `lost` are lost: those that are hit, the largest, which may lend.

        One more stands for all the others, if there are others, as a holder of every layer and to be merged
        with. In small fleets all matter.
        """
        hit = {index for node in lost if (index := self.places.get(node)) is not None}
        count = len(self.pipelines)
        if count <= ALL_MATTER:
            return tuple(range(count))
        rest = {index: sum(node not in lost for node in self.pipelines[index]) for index in hit}
        short = sum(least - left for left in rest.values() if 0 < left < least)
        chosen = set(hit)
        if short and self.sizes[-1][0] > least:
            chosen.update(self._largest(short + len(hit), least))
        chosen.update(islice((index for index in range(count) if index not in hit), 1))
        return tuple(sorted(chosen))

    def _largest(self, wanted: int, above: int) -> list[int]:
        """`wanted` of the largest pipelines with more than `above` nodes, or all that there are."""
        found: list[int] = []
        for size, _ in reversed(self.sizes):
            if size <= above or len(found) >= wanted:
                break
            of_size = (index for index, pipeline in enumerate(self.pipelines) if len(pipeline) == size)
            found.extend(islice(of_size, wanted - len(found)))
        return found

    def replaced(self, gaps: Sequence[int], new: Sequence[tuple[int, ...]]) -> Fleet:
        """The fleet with other pipelines in the place of some."""
        gone = [self.pipelines[index] for index in gaps]
        pipelines, placed = spliced(self.pipelines, gaps, new)
        changes: dict[int, int | None] = {node: None for pipeline in gone for node in pipeline}
        changes.update((node, index) for pipeline, index in placed for node in pipeline)
        counts = Counter(dict(self.sizes))
        counts.subtract(map(len, gone))
        counts.update(map(len, new))
        sizes = tuple(sorted((size, count) for size, count in counts.items() if count))
        return Fleet(pipelines, self.places.changed(changes.items()), sizes)

    def dealt(self, more: Sequence[int], chosen: Sizes) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Which pipelines to take apart and which to make of their nodes and `more`, to be of sizes
        `chosen`.
        """
        have, wanted = Counter(dict(self.sizes)), Counter(dict(chosen))
        surplus, missing = have - wanted, wanted - have
        gaps = []
        for index, pipeline in enumerate(self.pipelines):
            if not surplus:
                break
            if surplus[len(pipeline)] > 0:
                surplus -= Counter((len(pipeline),))
                gaps.append(index)
        pool = [node for index in gaps for node in self.pipelines[index]] + list(more)
        new, start = [], 0
        for size in sorted(missing.elements(), reverse=True):
            new.append(tuple(pool[start : start + size]))
            start += size
        return tuple(gaps), new


def fleet(pipelines: Sequence[tuple[int, ...]]) -> Fleet:
    """The fleet of these pipelines."""
    places = Places({node: index for index, pipeline in enumerate(pipelines) for node in pipeline})
    return Fleet(tuple(pipelines), places, tuple(sorted(Counter(map(len, pipelines)).items())))


class _Spans:
    """The layers that node `index` of a pipeline of `size` nodes holds."""

    def __init__(self, templates: Templates | None, layers: int) -> None:
        self._templates = templates
        self._layers = layers
        self._known: dict[int, tuple[range, ...]] = {}

    def __call__(self, size: int, index: int) -> range:
        if self._templates is None:  # measured as a whole: every node stands for the whole model's pipeline
            return range(self._layers)
        if size not in self._known:
            template: Template | None = self._templates.template(size)
            assert template is not None  # pipelines are made of templates
            self._known[size] = tuple(template.layers_of(node) for node in range(size))
        return self._known[size][index]


def _layer_seconds(profile: Profile, samples: int) -> dict[int, Sequence[float]]:
    """Forward and backward of each layer, by GPUs of a stage: powers of two that divide node and heads."""
    found: dict[int, Sequence[float]] = {}
    gpus = 1
    while gpus <= profile.machine.gpus_per_node:
        if profile.machine.gpus_per_node % gpus == 0 and profile.model.heads % gpus == 0:
            one = profile.layer(gpus, samples)
            found[gpus] = (one.forward_s + one.backward_s,) * profile.layers
        gpus *= 2
    return found

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    Reconfigured,
    Restart,
    distribute,
    fetches,
    partitions,
    reconfigure,
)
from perdure.core.policies.oobleck_templates import Template, Templates
from perdure.core.policies.work import Profile, Workload

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
        self._steps: dict[tuple[str, tuple[int, ...]], float] = {}
        self._sizes: dict[tuple[str, int], tuple[int, ...] | None] = {}
        self._rates: dict[tuple[str, int], BestRates] = {}

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        chosen = self.instantiate(work, len(nodes))
        return None if chosen is None else self._layout(work, _dealt((), nodes, chosen))

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

    def step_s(self, work: Workload, chosen: tuple[int, ...]) -> float:
        """A step of pipelines of the sizes `chosen`; infinite if the batch is too small for them."""
        key = (work.name, tuple(sorted(chosen)))
        if key not in self._steps:
            self._steps[key] = self._step_s(work, key[1])
        return self._steps[key]

    def _step_s(self, work: Workload, chosen: tuple[int, ...]) -> float:
        kit, profile = self.kit(work), work.profile
        if kit.templates is None or profile is None:
            return work.ideal_step_s(sum(chosen))
        found = {size: kit.templates.template(size) for size in set(chosen)}
        templates = {size: template for size, template in found.items() if template is not None}
        if len(templates) < len(found):
            return math.inf
        fill = {size: template.fill_s for size, template in templates.items()}
        slowest = {size: template.slowest_s for size, template in templates.items()}
        shares = distribute(kit.micro_batches, [fill[n] for n in chosen], [slowest[n] for n in chosen])
        if shares is None:
            return math.inf
        # Of pipelines of one size the one with the largest share is last.
        largest = dict(sorted(zip(chosen, shares, strict=True)))
        latency_s = max(templates[size].latency_s(share) for size, share in largest.items())
        spans = [len(t.layers_of(node)) for t in templates.values() for node in range(t.nodes)]
        gradients = 2 * profile.parameters_per_layer * max(spans)
        return latency_s + profile.all_reduce_s(gradients, len(chosen), work.node_bytes_s)

    def _lose(self, work: Workload, view: View, fault: Fault) -> Decision:
        settings = self.settings
        detect_s = settings.detect_s(fault)
        lost = frozenset(fault.nodes)
        returning = () if fault.severity == 1 else tuple((node, settings.rejoin_s) for node in fault.nodes)
        if view.layout is None:
            return Decision(None, "waits for more nodes", detect_s, returning=returning)
        kit = self.kit(work)
        span, copies = self._layers_of(work), settings.tolerates + 1
        found = reconfigure(view.layout.detail, lost, kit.least, span, kit.layers, copies)
        if isinstance(found, Restart):
            return self._restart(
                work, view, lost, Decision(None, found.reason, detect_s, returning=returning)
            )
        layout = self._layout(work, found.pipelines)
        if layout is None:
            reason = f"{len(found.pipelines)} pipelines are too many for the batch"
            return self._restart(work, view, lost, Decision(None, reason, detect_s, returning=returning))
        stages = self._reconfiguration(work, found)
        reason = "; ".join(found.steps[:3]) or "no pipeline was hit"
        return Decision(layout, reason, detect_s, stages, Lost.STEP, returning=returning)

    def _restart(self, work: Workload, view: View, lost: frozenset[int], decision: Decision) -> Decision:
        """From the checkpoint, on pipelines of all survivors."""
        assert view.layout is not None  # only a running job restarts
        nodes = tuple(node for pipeline in view.layout.detail for node in pipeline if node not in lost)
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
        before: Pipelines = view.layout.detail
        chosen = self.instantiate(work, sum(map(len, before)) + len(take))
        layout = None if chosen is None else self._layout(work, _dealt(before, take, chosen))
        if layout is None or layout.speed.step_s >= view.layout.speed.step_s:
            return None
        moved = Reconfigured(layout.detail, (), fetches(before, layout.detail, self._layers_of(work)))
        reason = f"{len(take)} nodes more: {len(layout.detail)} pipelines are instantiated"
        return Decision(layout, reason, stages=self._reconfiguration(work, moved), take=take)

    def _reconfiguration(self, work: Workload, change: Reconfigured) -> tuple[Stage, ...]:
        if self.settings.reconfigure_s is not None:
            return (Stage("reconfiguration", self.settings.reconfigure_s),)
        layers = max((len(wanted) for wanted in change.fetches.values()), default=0)
        copied = work.state_bytes / self.kit(work).layers * layers
        return (Stage("regroup", self.settings.regroup_s), Stage("copy", copied / work.node_bytes_s))

    def _fresh(self, work: Workload) -> tuple[Stage, ...]:
        return (Stage("restart", self.settings.restart_s), Stage("load", read_bytes=work.state_bytes))

    def _layers_of(self, work: Workload) -> _Spans:
        if work.name not in self._spans:
            kit = self.kit(work)
            self._spans[work.name] = _Spans(kit.templates, kit.layers)
        return self._spans[work.name]

    def _layout(self, work: Workload, pipelines: Pipelines) -> Layout | None:
        chosen = tuple(sorted(map(len, pipelines)))
        nodes = sum(chosen)
        if nodes < work.nodes_min:
            return None
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, nodes, pipelines)
        step_s = self.step_s(work, chosen)
        if not math.isfinite(step_s):
            return None
        best = self.instantiate(work, nodes)
        healthy_s = step_s if best is None else min(step_s, self.step_s(work, best))
        return layout_of(work, nodes, nodes * work.gpus_per_node, healthy_s, step_s, pipelines)


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


def _dealt(before: Pipelines, more: Sequence[int], chosen: tuple[int, ...]) -> Pipelines:
    """Pipelines of sizes `chosen`: those of `before` that fit stay, other nodes fill the rest in order."""
    have, wanted = Counter(map(len, before)), Counter(chosen)
    surplus = have - wanted
    kept: list[tuple[int, ...]] = []
    pool: list[int] = []
    for pipeline in before:
        if surplus and surplus[len(pipeline)] > 0:
            surplus[len(pipeline)] -= 1
            pool.extend(pipeline)
        else:
            kept.append(pipeline)
    pool.extend(more)
    start = 0
    for size in sorted((wanted - have).elements(), reverse=True):
        kept.append(tuple(pool[start : start + size]))
        start += size
    return tuple(kept)

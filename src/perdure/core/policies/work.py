"""What a policy has to know of a job: how big it is, how fast it is on n nodes, and what a layer costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from perdure.core.curve import Curve, state_bytes, step_flop
from perdure.core.throughput import (
    BYTES_PER_PARAMETER,
    LINK_SHARE,
    USABLE_MEMORY,
    Choice,
    Layout,
    Machine,
    best_layout,
    layer_times,
)
from perdure.schema.cluster import Model


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one layer for one micro-batch; recomputing the forward pass costs `forward_s` again."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of one layer, from which pipelines are planned.

    The cost of embedding and logits is spread evenly over the layers, so that all layers are alike.
    """

    model: Model
    machine: Machine
    _passes: dict[tuple[int, int], Pass] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def batch(self) -> int:
        return self.model.global_batch

    def layer(self, gpus: int, samples: int) -> Pass:
        """One layer on `gpus` GPUs of one node (tensor parallel), for a micro-batch of `samples`."""
        found = self._passes.get((gpus, samples))
        if found is None:
            times = layer_times(self.model, self.machine, gpus, samples)
            found = Pass(
                times.forward_s + times.head_forward_s / self.layers,
                times.backward_s + times.head_backward_s / self.layers,
            )
            self._passes[gpus, samples] = found
        return found

    @property
    def parameters_per_layer(self) -> float:
        return self.model.parameters / self.layers

    @property
    def training_bytes(self) -> float:
        """Weights, gradients and optimizer state of the whole model in GPU memory."""
        return BYTES_PER_PARAMETER * self.model.parameters

    def boundary_bytes(self, samples: int) -> float:
        """The 16-bit activations that pass from one layer to the next."""
        return 2.0 * samples * self.model.sequence * self.model.hidden

    def activation_bytes(self, samples: int) -> float:
        """All activations of one layer: s·b·h·(34 + 5·a·s/h) (Korthikanti et al., MLSys'23, section 4.1)."""
        model = self.model
        inner = 34 + 5 * model.heads * model.sequence / model.hidden
        return samples * model.sequence * model.hidden * inner

    @property
    def gpu_bytes(self) -> float:
        """What training can use of one GPU's memory."""
        return USABLE_MEMORY * self.machine.kind.memory_gb * 1e9

    @property
    def node_bytes_s(self) -> float:
        """What one node sends to others, all its network cards together, bytes per second."""
        return self.machine.kind.inter_gb_s * 1e9 * LINK_SHARE * self.machine.gpus_per_node

    def all_reduce_s(self, nbytes: float, members: int, bytes_s: float) -> float:
        """A ring all-reduce of `nbytes` among `members` at `bytes_s` each."""
        return 2 * (members - 1) / members * nbytes / bytes_s if members > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One job as a policy sees it, on the nodes of one cluster.

    `batch` is the number of samples and `step_flop` the work of one step, `state_bytes` the size of a full
    checkpoint, `node_bytes_s` the bandwidth of one node to others. `profile` is None for a job that is
    known by its measured speed alone.
    """

    name: str
    weight: float
    gpus_per_node: int
    nodes_min: int
    batch: int
    step_flop: float
    state_bytes: float
    node_bytes_s: float
    curve: Curve
    profile: Profile | None = None
    _layouts: dict[int, Layout | None] = field(default_factory=dict, repr=False, compare=False)
    _cuts: dict[tuple[int, int, int], Layout | None] = field(default_factory=dict, repr=False, compare=False)

    def ideal_step_s(self, nodes: int) -> float:
        """The shortest step known on `nodes` nodes; infinite where the job cannot run."""
        return self.curve.step_s(nodes) if nodes > 0 else math.inf

    def used(self, nodes: int) -> int:
        """The GPUs that the fastest setting on `nodes` nodes uses; 0 where the job cannot run."""
        return int(self.curve.gpus[min(nodes, self.curve.nodes_max)]) if nodes > 0 else 0

    def setting(self, nodes: int) -> Layout | None:
        """The parallel setting behind `ideal_step_s`; None if it is not known."""
        nodes = min(nodes, self.curve.nodes_max)
        if nodes not in self._layouts:
            self._layouts[nodes] = self.curve.layout(nodes)
        return self._layouts[nodes]

    def cut_setting(self, nodes: int, tensor: int, pipeline: int) -> Layout | None:
        """The fastest setting on `nodes` nodes whose replicas are cut `tensor` × `pipeline` ways, or None."""
        key = (min(nodes, self.curve.nodes_max), tensor, pipeline)
        if key not in self._cuts:
            model, gpus = self.curve.job.model, self.used_most(key[0])
            known = model is not None and self.curve.job.measured is None and nodes >= self.nodes_min
            choice = Choice(tensor=tensor, pipeline=pipeline)
            self._cuts[key] = (
                best_layout(model, self.curve.machine, gpus, choice) if known and model else None
            )
        return self._cuts[key]

    def used_most(self, nodes: int) -> int:
        """The GPUs of `nodes` nodes, the job's own limit considered."""
        return min(nodes * self.gpus_per_node, self.curve.job.gpus.max)

    def replica_nodes(self, nodes: int) -> int:
        """How many nodes one copy of the model spans on `nodes` nodes; 1 where the setting is not known."""
        setting = self.setting(nodes)
        return (
            1
            if setting is None
            else max(1, math.ceil(setting.tensor * setting.pipeline / self.gpus_per_node))
        )

    def replicas(self, nodes: int) -> int:
        """How many copies of the model there are on `nodes` nodes."""
        setting = self.setting(nodes)
        return max(1, nodes) if setting is None else setting.data


def workload(curve: Curve) -> Workload:
    """What policies know of the job of `curve`. Raises `UsageError` if the job lacks something they need."""
    job, machine = curve.job, curve.machine
    runs = [nodes for nodes in range(curve.nodes_max + 1) if curve.at(nodes) > 0]
    model = job.model
    batch = model.global_batch if model is not None else job.global_batch
    return Workload(
        name=job.name,
        weight=job.weight,
        gpus_per_node=machine.gpus_per_node,
        nodes_min=runs[0],
        batch=batch or 1,
        step_flop=step_flop(job),
        state_bytes=state_bytes(job),
        node_bytes_s=machine.kind.inter_gb_s * 1e9 * LINK_SHARE * machine.gpus_per_node,
        curve=curve,
        profile=None if model is None else Profile(model, machine),
    )

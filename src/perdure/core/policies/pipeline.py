"""Pipelines of whole nodes: the step time of D pipelines of P nodes each, a stage on every node.

Inside a node a stage is cut over `tensor` GPUs; the node's other GPUs are further columns with
micro-batches of their own. With M micro-batches in each column and t for one of them on one stage, forward
and backward,

    step = (M + P − 1)·t + sends of the first micro-batch + all-reduce over the columns
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from perdure.core.policies.work import Profile

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Grid:
    """D = `data` pipelines of P = `depth` nodes.

    `micro_batches` of `samples` each go through every column. `forward_s`, `recompute_s` and `backward_s` are
    one micro-batch on one stage; `reduce_s` the all-reduce and the optimizer's share, `send_s` one boundary.
    """

    depth: int
    data: int
    tensor: int
    samples: int
    micro_batches: int
    forward_s: float
    recompute_s: float
    backward_s: float
    send_s: float
    reduce_s: float

    @property
    def stage_s(self) -> float:
        """Forward and backward of one micro-batch on one stage, recomputation included."""
        return self.forward_s + self.recompute_s + self.backward_s

    @property
    def tail_s(self) -> float:
        """What a step takes besides its micro-batches and the pipeline's fill."""
        return 2 * (self.depth - 1) * self.send_s + self.reduce_s

    @property
    def step_s(self) -> float:
        return (self.micro_batches + self.depth - 1) * self.stage_s + self.tail_s


def grids(profile: Profile, nodes: int, depth: int, copies: float) -> Iterator[Grid]:
    """Every grid of `nodes` // `depth` pipelines that fits the memory.

    `copies` is how much state a node keeps in terms of its own stage's (1, or more with shadows).
    """
    machine = profile.machine
    data = nodes // depth
    if data == 0 or depth > profile.layers:
        return
    layers = math.ceil(profile.layers / depth)
    tensors = [
        q
        for q in range(1, machine.gpus_per_node + 1)
        if not (machine.gpus_per_node % q or profile.model.heads % q)
    ]
    for tensor in tensors:
        columns = data * (machine.gpus_per_node // tensor)
        state = copies * profile.training_bytes / profile.layers * layers / tensor
        for samples in MICRO_BATCHES:
            count = math.ceil(profile.batch / (columns * samples))
            if columns * samples > profile.batch and samples > 1:
                break
            in_flight = min(depth, count)
            for recompute in (False, True):
                kept = profile.boundary_bytes(samples) if recompute else profile.activation_bytes(samples)
                working = profile.activation_bytes(samples) if recompute else 0.0
                if state + (in_flight * layers * kept + working) / tensor > profile.gpu_bytes:
                    continue
                yield _grid(profile, depth, data, tensor, samples, count, recompute)


def _grid(
    profile: Profile, depth: int, data: int, tensor: int, samples: int, count: int, recompute: bool
) -> Grid:
    machine = profile.machine
    layers = math.ceil(profile.layers / depth)
    one = profile.layer(tensor, samples)
    link = profile.node_bytes_s / (machine.gpus_per_node // tensor)
    columns = data * (machine.gpus_per_node // tensor)
    gradients = 2 * profile.parameters_per_layer * layers
    # The columns of a node share its cards; inside one node alone the faster links do the work.
    bytes_s = link if data > 1 else machine.kind.intra_gb_s * 1e9 * tensor
    return Grid(
        depth=depth,
        data=data,
        tensor=tensor,
        samples=samples,
        micro_batches=count,
        forward_s=layers * one.forward_s,
        recompute_s=layers * one.forward_s if recompute else 0.0,
        backward_s=layers * one.backward_s,
        send_s=profile.boundary_bytes(samples) / link + 1e-6 * machine.kind.inter_us if depth > 1 else 0.0,
        reduce_s=profile.all_reduce_s(gradients, columns, bytes_s),
    )

"""How fast a transformer trains on x GPUs: an analytic model, its layouts searched exhaustively.

A layout is tensor × pipeline × data parallel, a micro-batch size, a number of interleaved chunks and whether
activations are recomputed. For each layout that fits the GPU's memory the time of a step is the sum of

    m · t_last              m micro-batches through the slowest stage, the last one, which also has the
    vocabulary (p − 1) · t_stage / v   the bubble of 1F1B, v interleaved chunks a stage (Narayanan et al.,
    SC'21, section 2.2) all-reduce              of the gradients over the data-parallel group, as a ring, not
    overlapped optimizer               one pass over parameters, gradients and moments in GPU memory

and a stage's time comes from its matrix products, from the memory traffic of everything else (softmax,
dropout, normalisation, residuals) and from tensor parallelism's all-reduces. Three constants are free
(`Efficiency`); how they were calibrated, and on which rows, is in `perdure.core.calibration`.

Everything is vectorised over layouts × GPU counts, so that a job's whole curve costs milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools

import msgspec
import numpy as np
from numpy.typing import NDArray

from perdure.schema.cluster import GpuKind, Model

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LINK_SHARE = 0.8
"""What a collective reaches of a link's rate: an assumption (usual for NCCL's large messages)."""
USABLE_MEMORY = 0.95
"""Share of GPU memory that training can use; the rest is context, allocator slack and NCCL's buffers."""
BYTES_PER_PARAMETER = 16
"""Mixed precision with Adam: 2 of weight, 2 of gradient, 4 + 4 + 4 of fp32 weight and moments."""
OPTIMIZER_TRAFFIC = 28
"""Bytes per parameter that Adam moves: reads gradient, weight and moments, writes weights and moments."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
_CHUNK = 1 << 20
"""Cells of the (GPU counts × layouts) table that are evaluated at once; bounds the memory used."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The free constants.

    A matrix product whose smallest dimension is n runs at `gemm · n / (n + saturation)` of the peak;
    everything between the products moves `traffic` times the activations' bytes through GPU memory in each
    pass.
    """

    gemm: float
    saturation: float
    traffic: float


DEFAULT = Efficiency(gemm=0.664, saturation=61.7, traffic=1.73)
"""Calibrated on rows 1, 3, 5, 7 and 9 of Megatron's weak-scaling table; see `perdure.core.calibration`."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a job runs on: a GPU kind, how many of it a node has, and the free constants."""

    kind: GpuKind
    gpus_per_node: int
    efficiency: Efficiency = DEFAULT


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Restricts the search; None leaves a dimension free."""

    tensor: int | None = None
    pipeline: int | None = None
    interleave: bool = True
    recompute: bool | None = None


FREE = Choice()


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a step: degrees, micro-batch size, interleaved chunks, and the step time it gives."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    chunks: int
    recompute: bool
    step_s: float


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per micro-batch on one tensor-parallel group, tensor parallelism's all-reduces included.

    `forward_s` and `backward_s` of one transformer layer; `head_forward_s` and `head_backward_s` of the
    logits; the recomputation of a layer costs `forward_s` again.
    """

    forward_s: float
    backward_s: float
    head_forward_s: float
    head_backward_s: float


def layer_times(model: Model, machine: Machine, tensor: int, micro_batch: int) -> LayerTimes:
    """The times that pipeline planners (templates, morphing) need. `tensor` must be at least 1."""
    times = _pass_times(model, machine, np.array([tensor]), np.array([micro_batch]))
    return LayerTimes(
        forward_s=float(times.forward_s[0]),
        backward_s=float(times.backward_s[0]),
        head_forward_s=float(times.head_forward_s[0]),
        head_backward_s=float(times.head_backward_s[0]),
    )


@dataclasses.dataclass(frozen=True)
class _PassTimes:
    forward_s: Floats
    backward_s: Floats
    head_forward_s: Floats
    head_backward_s: Floats


def _pass_times(model: Model, machine: Machine, tensor: Ints, micro_batch: Ints) -> _PassTimes:
    """Times of one layer and of the logits for arrays of tensor degrees and micro-batch sizes."""
    kind, free = machine.kind, machine.efficiency
    hidden, sequence = float(model.hidden), float(model.sequence)
    tokens = np.asarray(micro_batch * sequence, dtype=np.float64)

    def product(
        rows: Floats, inner: Floats | float, columns: Floats | float, count: Floats | float = 1.0
    ) -> Floats:
        smallest = np.minimum(np.minimum(rows, inner), columns)
        rate = kind.peak_tflops * 1e12 * free.gemm * smallest / (smallest + free.saturation)
        return np.asarray(2.0 * count * rows * inner * columns / rate)

    wide = hidden / tensor
    dense = product(tokens, hidden, 3 * wide) + product(tokens, wide, hidden)
    dense = dense + product(tokens, hidden, 4 * wide) + product(tokens, 4 * wide, hidden)
    heads_here = micro_batch * model.heads / tensor
    per_head = hidden / model.heads
    full = np.full(tokens.shape, sequence)
    attention = product(full, per_head, sequence, heads_here) + product(full, sequence, per_head, heads_here)
    # Activations per layer in bytes: 10·s·b·h outside and 24·s·b·h inside the tensor-parallel part, 5·a·s²·b
    # of scores (Korthikanti et al., MLSys'23, section 4.1).
    activations = tokens * hidden * (10 + 24 / tensor) + 5 * model.heads * sequence * tokens / tensor
    between = free.traffic * activations / (kind.memory_gb_s * 1e9)
    message = tokens * hidden * 2
    ring = 2 * (tensor - 1) / tensor * message / (kind.intra_gb_s * 1e9 * LINK_SHARE)
    reduces = 2 * (ring + (tensor > 1) * 4e-6 * kind.intra_us)
    head = product(tokens, hidden, model.vocabulary / tensor)
    # Logits and their fp32 softmax: read and written once in each direction.
    logits = free.traffic * 4 * tokens * model.vocabulary / tensor / (kind.memory_gb_s * 1e9)
    return _PassTimes(
        forward_s=dense + attention + between + reduces,
        backward_s=2 * (dense + attention + between) + reduces,
        head_forward_s=head + logits,
        head_backward_s=2 * head + logits,
    )


@dataclasses.dataclass(frozen=True)
class _Layouts:
    """Every layout that fits a GPU's memory, but for the data-parallel degree, as parallel arrays."""

    tensor: Ints
    pipeline: Ints
    micro_batch: Ints
    chunks: Ints
    recompute: Ints
    stage_s: Floats
    last_s: Floats
    gradient_bytes: Floats
    optimizer_s: Floats


def _stages(layers: int) -> list[int]:
    """Pipeline depths worth trying: those that change the number of layers of the fullest stage."""
    return sorted({-(-layers // per_stage) for per_stage in range(1, layers + 1)})


def _degrees(model: Model, machine: Machine, choice: Choice) -> NDArray[np.int64]:
    """Columns tensor, pipeline, micro-batch, chunks, recompute of every layout, memory not yet considered."""
    tensors = [
        t
        for t in range(1, machine.gpus_per_node + 1)
        if model.heads % t == 0 and machine.gpus_per_node % t == 0
    ]
    pipelines = _stages(model.layers)
    rows = [
        (tensor, pipeline, micro_batch, chunks, recompute)
        for tensor in (tensors if choice.tensor is None else [choice.tensor])
        for pipeline in (pipelines if choice.pipeline is None else [choice.pipeline])
        for micro_batch in MICRO_BATCHES
        if micro_batch <= model.global_batch
        for chunks in _chunks(model.layers, pipeline, choice.interleave)
        for recompute in ((0, 1) if choice.recompute is None else (int(choice.recompute),))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 5).T


def _chunks(layers: int, pipeline: int, interleave: bool) -> list[int]:
    """How often a stage may be cut for interleaving; it needs stages of equal length."""
    if pipeline == 1 or not interleave or layers % pipeline:
        return [1]
    return [chunks for chunks in range(1, layers // pipeline + 1) if (layers // pipeline) % chunks == 0]


@functools.lru_cache(maxsize=256)
def _layouts(model: Model, machine: Machine, choice: Choice) -> _Layouts:
    tensor, pipeline, micro_batch, chunks, recompute = _degrees(model, machine, choice)
    kind = machine.kind
    hidden = float(model.hidden)
    per_stage = -(-model.layers // pipeline)
    tokens = micro_batch * float(model.sequence)
    parameters = (12.0 * per_stage * hidden**2 + (model.vocabulary + model.sequence) * hidden) / tensor
    layer_bytes = tokens * hidden * (10 + 24 / tensor) + 5 * model.heads * model.sequence * tokens / tensor
    kept = np.where(recompute == 1, 2 * tokens * hidden, layer_bytes)
    # 1F1B keeps up to p micro-batches alive at the first stage, interleaving (1 + (p − 1)/(p·v)) of that.
    alive = pipeline * np.where(chunks > 1, 1 + (pipeline - 1) / (pipeline * chunks), 1.0)
    working = np.where(recompute == 1, layer_bytes, 0.0) + 4 * tokens * model.vocabulary / tensor
    memory = BYTES_PER_PARAMETER * parameters + alive * per_stage * kept + working
    fits = memory <= USABLE_MEMORY * kind.memory_gb * 1e9
    tensor, pipeline, micro_batch, chunks, recompute = (
        column[fits] for column in (tensor, pipeline, micro_batch, chunks, recompute)
    )
    per_stage, parameters, tokens = per_stage[fits], parameters[fits], tokens[fits]
    times = _pass_times(model, machine, tensor, micro_batch)
    inside = tensor * pipeline <= machine.gpus_per_node
    link = np.where(inside, kind.intra_gb_s, kind.inter_gb_s) * 1e9 * LINK_SHARE
    latency = np.where(inside, kind.intra_us, kind.inter_us) * 1e-6
    # An activation goes on and its gradient comes back at every chunk's border, cut t ways (scatter-gather).
    hop = (pipeline > 1) * 2 * chunks * (tokens * hidden * 2 / tensor / link + latency)
    stage = per_stage * (times.forward_s * (1 + recompute) + times.backward_s) + hop
    return _Layouts(
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        chunks=chunks,
        recompute=recompute,
        stage_s=stage,
        last_s=stage + times.head_forward_s + times.head_backward_s,
        gradient_bytes=2 * parameters,
        optimizer_s=parameters * OPTIMIZER_TRAFFIC / (kind.memory_gb_s * 1e9),
    )


def _step_seconds(model: Model, machine: Machine, layouts: _Layouts, gpus: Ints) -> Floats:
    """Step time of every layout on every GPU count, shape (counts, layouts); infinite where it cannot run."""
    kind = machine.kind
    data = gpus[:, None] // (layouts.tensor * layouts.pipeline)[None, :]
    degree = np.maximum(data, 1).astype(np.float64)
    # Where the batch does not divide evenly, the step lasts as long as its largest share.
    micro_batches = np.ceil(model.global_batch / (degree * layouts.micro_batch))
    beside = np.minimum(np.maximum(machine.gpus_per_node // layouts.tensor, 1), degree)
    crosses = gpus[:, None] > machine.gpus_per_node
    link = np.where(crosses, kind.inter_gb_s * beside, kind.intra_gb_s) * 1e9 * LINK_SHARE
    latency = np.where(crosses, kind.inter_us, kind.intra_us) * 1e-6
    reduce = (
        2 * (degree - 1) / degree * layouts.gradient_bytes / link
        + (degree > 1) * 2 * np.log2(degree) * latency
    )
    bubble = (layouts.pipeline - 1) * layouts.stage_s / layouts.chunks
    step = micro_batches * layouts.last_s + bubble + reduce + layouts.optimizer_s
    # Interleaving deals micro-batches to chunks in groups of p (Narayanan et al., section 2.2).
    refused = (data < 1) | ((layouts.chunks > 1) & (micro_batches % layouts.pipeline != 0))
    # No replica works on less than one whole micro-batch.
    refused |= degree * layouts.micro_batch > np.maximum(model.global_batch, layouts.micro_batch)
    step[refused] = np.inf
    return step


def best_layout(model: Model, machine: Machine, gpus: int, choice: Choice = FREE) -> Layout | None:
    """The fastest layout of `model` on at most `gpus` GPUs, or None if none fits their memory."""
    layouts = _layouts(model, machine, choice)
    if not layouts.tensor.size or gpus < 1:
        return None
    step = _step_seconds(model, machine, layouts, np.array([gpus]))[0]
    best = int(np.argmin(step))
    if not np.isfinite(step[best]):
        return None
    tensor, pipeline = int(layouts.tensor[best]), int(layouts.pipeline[best])
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=gpus // (tensor * pipeline),
        micro_batch=int(layouts.micro_batch[best]),
        chunks=int(layouts.chunks[best]),
        recompute=bool(layouts.recompute[best]),
        step_s=float(step[best]),
    )


def step_seconds(model: Model, machine: Machine, gpus: Ints, choice: Choice = FREE) -> Floats:
    """The step time of the fastest layout on each of `gpus`, shape as `gpus`; infinite where none fits."""
    layouts = _layouts(model, machine, choice)
    if not layouts.tensor.size:
        return np.full(gpus.shape, np.inf)
    rows = max(1, _CHUNK // layouts.tensor.size)
    parts = [gpus[start : start + rows] for start in range(0, gpus.size, rows)]
    return np.concatenate(
        [_step_seconds(model, machine, layouts, part).min(axis=1) for part in parts] or [gpus * 1.0]
    )

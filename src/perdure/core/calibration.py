"""The throughput model's free constants, calibrated on some of Megatron's rows and judged on the others.

Source: Narayanan et al., 'Efficient large-scale language model training on GPU clusters using Megatron-LM',
SC'21, table 1 (weak scaling, interleaved schedule) and its strong-scaling comparison (1F1B): A100-80GB, mixed
precision, sequence 2048, vocabulary 51,200, activation recomputation, FLOP counted with the recomputation.

`throughput.DEFAULT` is `calibrate(WEAK[0::2])`, rows 1, 3, 5, 7 and 9; a test holds that. Rows 2, 4, … and
all of `STRONG` were never seen by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from perdure.core.gpus import KINDS
from perdure.core.throughput import DEFAULT, Choice, Efficiency, Machine, best_layout
from perdure.schema.cluster import Model


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published measurement; `tflops` is per GPU."""

    parameters_b: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: float
    interleave: bool

    @property
    def model(self) -> Model:
        """The row's model; sequence and vocabulary are the same in all rows."""
        return Model(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence=2048,
            vocabulary=51_200,
            global_batch=self.batch,
        )


def _row(*values: float, interleave: bool) -> Row:
    names = ("parameters_b", "heads", "hidden", "layers", "tensor", "pipeline", "gpus", "batch", "tflops")
    return msgspec.convert(dict(zip(names, values, strict=True)) | {"interleave": interleave}, Row)


WEAK: tuple[Row, ...] = tuple(
    _row(*values, interleave=True)
    for values in (
        # parameters B, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s per GPU
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
)

STRONG: tuple[Row, ...] = tuple(
    _row(*values, interleave=False)
    for values in (
        (174.6, 96, 12288, 96, 8, 12, 384, 1536, 153),
        (174.6, 96, 12288, 96, 8, 12, 768, 1536, 149),
        (174.6, 96, 12288, 96, 8, 12, 1536, 1536, 141),
        (529.6, 128, 20480, 105, 8, 35, 560, 2240, 171),
        (529.6, 128, 20480, 105, 8, 35, 1120, 2240, 167),
        (529.6, 128, 20480, 105, 8, 35, 2240, 2240, 159),
    )
)


def predicted_tflops(row: Row, efficiency: Efficiency = DEFAULT) -> float:
    """TFLOP/s per GPU at the row's own (t, p), with FLOP counted as its authors do; 0 if it does not fit."""
    model = row.model
    machine = Machine(kind=KINDS["A100-80GB"], gpus_per_node=8, efficiency=efficiency)
    choice = Choice(tensor=row.tensor, pipeline=row.pipeline, interleave=row.interleave, recompute=True)
    layout = best_layout(model, machine, row.gpus, choice)
    if layout is None:
        return 0.0
    extra = model.sequence / (6 * model.hidden) + model.vocabulary / (16 * model.layers * model.hidden)
    flop = 96.0 * model.global_batch * model.sequence * model.layers * model.hidden**2 * (1 + extra)
    return flop / layout.step_s / row.gpus / 1e12


def errors(rows: Sequence[Row], efficiency: Efficiency = DEFAULT) -> list[float]:
    """Relative error of each row: (predicted − published) / published."""
    return [predicted_tflops(row, efficiency) / row.tflops - 1 for row in rows]


def calibrate(rows: Sequence[Row]) -> Efficiency:
    """The constants with the least sum of squared relative errors on `rows`, by pattern search.

    Starts from plausible values, not from `DEFAULT`; stops when steps of 0.1 % gain nothing.
    """
    best = [0.7, 100.0, 1.0]

    def loss(values: Sequence[float]) -> float:
        gemm, saturation, traffic = values
        if not 0 < gemm <= 1:
            return math.inf
        return sum(e * e for e in errors(rows, Efficiency(gemm=gemm, saturation=saturation, traffic=traffic)))

    least, step = loss(best), 0.2
    while step > 0.001:
        tried = [
            [value * factor if place == index else value for place, value in enumerate(best)]
            for index in range(len(best))
            for factor in (1 + step, 1 / (1 + step))
        ]
        found, values = min((loss(values), values) for values in tried)
        if found < least:
            least, best = found, values
        else:
            step /= 2
    return Efficiency(gemm=best[0], saturation=best[1], traffic=best[2])

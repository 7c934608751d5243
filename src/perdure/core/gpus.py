"""The GPU kinds that perdure knows, as data.

To add one, add a line to `KINDS` from its data sheet, or, without touching perdure, a table to the scenario:

    [gpu."MI300X"]
    peak_tflops = 1307
    memory_gb = 192
    memory_gb_s = 5300
    intra_gb_s = 448
    inter_gb_s = 50

`peak_tflops` is dense fp16 / bf16; `intra_gb_s` is what one GPU sends to its neighbours in one direction;
`inter_gb_s` is one GPU's share of the network cards of its node. The last belongs to the server, not to the
GPU: the values here are those of the maker's own servers (DGX, HGX with one card per GPU), except where the
comment says otherwise. One cluster has one kind: a synchronous step goes at the pace of its slowest GPU.
"""

from __future__ import annotations

import difflib

from perdure.schema.cluster import GpuKind, Scenario
from perdure.schema.errors import UsageError


def _kind(
    tflops: float, memory_gb: float, memory_gb_s: float, intra_gb_s: float, inter_gb_s: float
) -> GpuKind:
    return GpuKind(
        peak_tflops=tflops,
        memory_gb=memory_gb,
        memory_gb_s=memory_gb_s,
        intra_gb_s=intra_gb_s,
        inter_gb_s=inter_gb_s,
    )


KINDS: dict[str, GpuKind] = {
    # name: dense 16-bit TFLOP/s, memory GB, memory GB/s, to neighbours GB/s, to other nodes GB/s
    "V100-16GB": _kind(125, 16, 900, 150, 6.25),
    "V100-32GB": _kind(125, 32, 900, 150, 6.25),
    "V100-p3": _kind(125, 16, 900, 12, 1.25),  # AWS p3.2xlarge: one GPU, 10 Gb/s
    "A40-48GB": _kind(149.7, 48, 696, 25, 25),  # one GPU and one 200 Gb/s card per node
    "A100-40GB": _kind(312, 40, 1555, 300, 25),
    "A100-80GB": _kind(312, 80, 2039, 300, 25),
    "A800-80GB": _kind(312, 80, 2039, 200, 25),
    "L40S": _kind(362, 48, 864, 25, 25),
    "H100-80GB": _kind(989, 80, 3350, 450, 50),
    "H800-80GB": _kind(989, 80, 3350, 200, 50),
    "H200": _kind(989, 141, 4800, 450, 50),
    "B200": _kind(2250, 180, 7700, 900, 50),
}


def gpu_kind(scenario: Scenario) -> GpuKind:
    """The kind that `scenario` names: its own `[gpu.NAME]` first, then `KINDS`. Raises `UsageError`."""
    name = scenario.cluster.gpu
    known = {**KINDS, **scenario.gpu}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(
        f"cluster.gpu: unknown GPU kind {name!r}{hint}, expected one of {', '.join(known)}, or its own table "
        f"[gpu.{name!r}]"
    )

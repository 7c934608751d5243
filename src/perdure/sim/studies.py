"""Failure rates of published studies, as named clusters to start from, and tables of rates as traces.

| study | source | rate |
|---|---|---|
| unicron-a | Unicron, arXiv 2401.00134: 8 weeks, 128 GPUs | 10 SEV1 + 33 others, repairs of 1–7 days |
| unicron-b | the same: 7 days, 128 GPUs | 26 SEV1 + 80 others |
| llama3 | The Llama 3 Herd of Models, table 5: 54 days, 16,384 H100 | 419 unexpected interruptions |
| meta-rsc1, meta-rsc2 | Meta, HPCA'25 | 6.50 and 2.34 failures per 1,000 node-days |
| byterobust | ByteRobust, SOSP'25: the mix of 778,135 jobs | shares only |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from perdure.schema.cluster import Cluster, Severity
from perdure.schema.errors import UsageError
from perdure.schema.text import csv_rows, quoted, whole
from perdure.sim.traces import read_text

LLAMA3_DAYS = 54.0
LLAMA3_GPUS = 16_384
COUNT_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Study:
    """Mean hours between two faults of any severity on one node of eight GPUs, and their severities.

    `certainty` says how sure the figures are: high, medium or low.
    """

    mtbf_hours_per_node: float
    severity: Severity
    certainty: str


def per_node(failures: float, days: float, nodes: float) -> float:
    """Mean hours between failures of one node."""
    return days * 24 * nodes / failures


UNICRON_OTHERS = (0.233, 0.486)
"""SEV2 and SEV3 among Unicron's failures, by which its '33 others' and '80 others' are divided."""


def _unicron(sev1: float, others: float) -> Severity:
    second, third = UNICRON_OTHERS
    total = second + third
    return Severity(sev1=sev1, sev2=others * second / total, sev3=others * third / total)


BYTEROBUST_SHARES: Mapping[str, tuple[float, int]] = {
    "CUDA error": (36.1, 1),
    "CPU overload": (11.0, 1),
    "CPU out of memory": (10.1, 2),
    "hang": (9.9, 2),
    "MFU decline": (0.8, 1),
    "NaN": (0.3, 2),
}
"""Shares of all incidents in % and what cures them (certainty M; manual changes, 17.3 %, are no faults). A
CUDA error or an overloaded host evicts the machine there; the severities are an interpretation."""

LLAMA3_SEVERITIES: Mapping[str, int] = {
    "GPU": 1,
    "Host": 1,
    "Unplanned Maintenance": 1,
    "Network": 3,
    "Dependency": 2,
    "Unknown": 2,
}
"""What cures an interruption of each of table 5's categories: an interpretation, as the table does not
say.
"""

STUDIES: Mapping[str, Study] = {
    "unicron-a": Study(per_node(43, 56, 16), _unicron(10, 33), "high"),
    "unicron-b": Study(per_node(106, 7, 16), _unicron(26, 80), "high"),
    "llama3": Study(
        per_node(419, LLAMA3_DAYS, LLAMA3_GPUS / 8), Severity(sev1=321, sev2=63, sev3=35), "high"
    ),
    "meta-rsc1": Study(1000 * 24 / 6.50, Severity(sev1=1, sev2=0, sev3=0), "high"),
    "meta-rsc2": Study(1000 * 24 / 2.34, Severity(sev1=1, sev2=0, sev3=0), "high"),
}


def rates_of_table(cluster: Cluster) -> Cluster | None:
    """The cluster with the rate and severities of a table of interruptions; None if its trace is no table.

    Columns `component,category,count`; the counts are those of Llama 3's 54 days on 16,384 GPUs. Raises
    `UsageError`.
    """
    text, where = read_text(cluster), f"cluster.trace: {cluster.trace}"
    if not text.startswith("component,category,count"):
        return None
    counts = {1: 0.0, 2: 0.0, 3: 0.0}
    for number, row in list(csv_rows(text, where))[1:]:
        category, cell = row[1:3] if len(row) > 2 else ("", "")
        count = whole(cell)
        if category not in LLAMA3_SEVERITIES or count is None or count > COUNT_MAX:
            raise UsageError(
                f"{where}: line {number}: {quoted(category)}, {quoted(cell)}, expected a count of at most "
                f"{COUNT_MAX:,} and a category of {', '.join(LLAMA3_SEVERITIES)}"
            )
        counts[LLAMA3_SEVERITIES[category]] += count
    if not any(counts.values()):
        raise UsageError(f"{where}: no interruption, expected at least one count above 0")
    return msgspec.structs.replace(
        cluster,
        trace=None,
        mtbf_hours_per_node=per_node(sum(counts.values()), LLAMA3_DAYS, LLAMA3_GPUS / cluster.gpus_per_node),
        severity=Severity(sev1=counts[1], sev2=counts[2], sev3=counts[3]),
    )

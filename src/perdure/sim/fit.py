"""The rates of a user's own run, from its `events.jsonl`: how often nodes fail, how, and what recovery took.

Every `fault_detected` is a fault, unless a worker asked to leave; the next `fault_decided` of the same
worker gives its severity. The time that nodes were observed runs from the first to the last event of each
start. What is fitted replaces the scenario's own values; how sure it is stands beside it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perdure.schema.errors import UsageError

Z95 = 1.96


class _Line(msgspec.Struct):
    event: str
    wall_s: float
    generation: object = None
    worker: int | None = None
    node: str | None = None
    kind: str | None = None
    severity: str | None = None
    detected_by: str | None = None
    detect_s: float | None = None


@dataclass(frozen=True)
class Fit:
    """What a run says. `node_hours` were observed and had `faults`; `times` are medians in seconds."""

    node_hours: float
    faults: int
    severities: dict[int, int]
    times: dict[str, float] = field(default_factory=dict)

    @property
    def mtbf_hours_per_node(self) -> float:
        return self.node_hours / self.faults

    @property
    def mtbf_range_hours(self) -> tuple[float, float]:
        """95 % interval of the mean: the count of faults is Poisson, its square root normal with deviation
        1/2.
        """
        root = self.faults**0.5
        low, high = max(0.0, root - Z95 / 2) ** 2, (root + Z95 / 2) ** 2
        return self.node_hours / high, self.node_hours / low if low > 0 else float("inf")

    def overrides(self) -> dict[str, object]:
        """Dotted scenario keys and the values that were fitted; a trace gives way to the rate."""
        found: dict[str, object] = {
            "cluster.trace": None,
            "cluster.mtbf_hours_per_node": self.mtbf_hours_per_node,
            "cluster.severity": {f"sev{grade}": float(count) for grade, count in self.severities.items()},
        }
        found.update({f"policy.perdure.{name}": value for name, value in self.times.items()})
        return found

    def as_json(self) -> dict[str, Any]:
        low, high = self.mtbf_range_hours
        return {
            "node_hours": self.node_hours,
            "faults": self.faults,
            "mtbf_hours_per_node": self.mtbf_hours_per_node,
            "mtbf_range_hours": [low, high if high != float("inf") else None],
            "severities": {f"sev{grade}": count for grade, count in self.severities.items()},
            "perdure": self.times,
        }


DETECTORS = {"pidfd": "process_s", "exception": "exception_s", "lease": "node_s"}
"""Who noticed a fault → the setting of the policy `perdure` that its `detect_s` is."""


def fit_events(path: Path) -> Fit:
    """Fit `path`. Raises `UsageError` if it is no event log or has no fault."""
    lines = _read(path)
    faults = _faults(lines)
    node_hours = _node_hours(lines)
    if not faults:
        raise UsageError(f"--fit {path}: no fault in {node_hours:.3g} node-hours, expected one or more")
    if node_hours <= 0:
        raise UsageError(f"--fit {path}: all events at one time, expected a run that lasted")
    severities = dict.fromkeys((1, 2, 3), 0)
    times: dict[str, list[float]] = defaultdict(list)
    for fault, severity in faults:
        severities[severity] += 1
        setting = DETECTORS.get(fault.detected_by or "")
        if setting and fault.detect_s is not None and fault.detect_s >= 0:
            times[setting].append(fault.detect_s)
    times["regroup_s"] = _regroupings(lines)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    return Fit(node_hours, len(faults), severities, medians)


def _read(path: Path) -> list[_Line]:
    """All lines; the last may be torn, any other that cannot be read is an error."""
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"--fit {path}: cannot be read ({error.strerror}), expected an events.jsonl"
        ) from error
    found = []
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            found.append(msgspec.json.decode(text, type=_Line))
        except (msgspec.DecodeError, RecursionError) as error:
            if number < len(raw):
                raise UsageError(f"--fit {path}: line {number}: {error}, expected an event") from error
    return found


def _faults(lines: Sequence[_Line]) -> list[tuple[_Line, int]]:
    """Every fault with its severity; the same worker's second notice belongs to the first."""
    found: list[tuple[_Line, int]] = []
    open_faults: dict[object, int] = {}
    for line in lines:
        if line.event == "fault_detected" and line.kind != "leave":
            if line.worker is None or line.worker not in open_faults:
                open_faults[line.worker] = len(found)
                found.append((line, 1 if line.kind == "node" else 2))
        elif line.event == "fault_decided" and line.worker in open_faults:
            index = open_faults[line.worker]
            if line.severity in ("SEV1", "SEV2", "SEV3"):
                found[index] = (found[index][0], int(line.severity[3]))
        elif line.event == "worker_started":
            open_faults.pop(line.worker, None)
    return found


def _node_hours(lines: Sequence[_Line]) -> float:
    """Nodes × hours from the first to the last event of every start of the run."""
    total, nodes, start, last = 0.0, set[str](), None, 0.0
    for line in lines:
        if line.event == "run_started" and start is not None:
            total += max(1, len(nodes)) * (last - start)
            nodes, start = set(), None
        start = line.wall_s if start is None else start
        last = line.wall_s
        if line.node:
            nodes.add(line.node)
    return (total + (max(1, len(nodes)) * (last - start) if start is not None else 0.0)) / 3600.0


def _regroupings(lines: Sequence[_Line]) -> list[float]:
    """Seconds from opening a generation to computing in it, the first of each start left out."""
    opened: dict[str, float] = {}
    found: list[float] = []
    first = True
    for line in lines:
        if line.event == "run_started":
            first = True
        elif line.event == "generation_opened":
            opened[str(line.generation)] = line.wall_s
        elif line.event == "generation_computing" and str(line.generation) in opened:
            if not first:
                found.append(line.wall_s - opened[str(line.generation)])
            first = False
    return found

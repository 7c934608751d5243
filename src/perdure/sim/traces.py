"""Readers for public failure and preemption traces.

| content | where it is used |
|---|---|
| `time_ms,add or remove,node` | Bamboo (uclasystem/bamboo), Oobleck's simulator |
| `time,count` | Bamboo's AWS step curves; whole numbers are seconds, decimals hours |
| JSON list of `fault_start` and `fault_end` | InfiniteHBD (stepfun-ai/InfiniteHBD-Trace), times in days |
| `component,category,count,…` | a table of rates, such as Llama 3's; see `studies` |

The content says which it is. The reader maps the trace's nodes to 0, 1, … of the cluster. Whatever is
wrong with a file is a `UsageError` of one line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from perdure.core.policies.base import Method
from perdure.schema.cluster import Cluster
from perdure.schema.errors import UsageError
from perdure.schema.text import csv_rows, quoted, read_plain, whole
from perdure.sim.happenings import Happening, Kind, Trace

DAY_S = 86_400.0
FOREVER_S = 1e12


def read_text(cluster: Cluster) -> str:
    """The text of `cluster.trace`. Raises `UsageError` that says where to get a missing one."""
    path = Path(cluster.trace or "")
    try:
        return read_plain(path)
    except (OSError, UnicodeDecodeError) as error:
        source = f"; get it from {cluster.trace_source}" if cluster.trace_source else ""
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(
            f"cluster.trace: {path} cannot be read ({reason}), expected a trace{source}"
        ) from error


def read_trace(cluster: Cluster, seed: int = 0) -> Trace:
    """The happenings of `cluster.trace`.

    `seed` chooses the nodes that go where the trace gives counts only. Raises `UsageError`.
    """
    text, where = read_text(cluster), f"cluster.trace: {cluster.trace}"
    nodes = cluster.nodes + cluster.spares
    if text.lstrip().startswith(("[", "{")):
        return parse_faults(text, nodes, where)
    rows = list(csv_rows(text, where))
    if not rows:
        raise UsageError(f"{where}: empty, expected events")
    if len(rows[0][1]) == 2:
        return parse_counts(rows, nodes, where, seed)
    return parse_membership(rows, nodes, where)


def _time(cell: str, unit_s: float, before: float, where: str, number: int) -> float:
    """A time in seconds that is finite, not negative and not before the row above."""
    try:
        time = float(cell) * unit_s
    except ValueError:
        time = math.nan
    if not math.isfinite(time) or time < 0:
        raise UsageError(
            f"{where}: line {number}: time {quoted(cell)}, expected a finite number that is not negative"
        )
    if time < before:
        raise UsageError(
            f"{where}: line {number}: time {cell} is before the line above, expected it in order"
        )
    return time


def parse_membership(rows: list[tuple[int, list[str]]], nodes: int, where: str) -> Trace:
    """`time_ms,add|remove,node`: a node that is removed is gone at once; names get free places in order."""
    place: dict[str, int] = {}
    free = list(range(nodes - 1, -1, -1))
    found: list[Happening] = []
    absent = set(range(nodes))
    time = 0.0
    for number, row in rows:
        if len(row) != 3 or row[1] not in ("add", "remove"):
            text = quoted(",".join(row))
            raise UsageError(f"{where}: line {number}: {text}, expected time_ms,add|remove,node")
        time = _time(row[0], 1e-3, time, where, number)
        name = row[2]
        if row[1] == "add":
            if name in place:
                raise UsageError(
                    f"{where}: line {number}: {quoted(name)} is added but present, expected a remove first"
                )
            if not free:
                raise UsageError(
                    f"{where}: line {number}: more than {nodes} nodes at once, expected at most cluster.nodes"
                )
            place[name] = free.pop()
            if time == 0:
                absent.discard(place[name])
            else:
                found.append(Happening(time, Kind.ADD, place[name]))
        else:
            if name not in place:
                raise UsageError(
                    f"{where}: line {number}: {quoted(name)} is removed but absent, expected an add first"
                )
            found.append(Happening(time, Kind.REMOVE, place[name]))
            free.append(place.pop(name))
    return Trace(tuple(found), frozenset(absent))


def parse_counts(rows: list[tuple[int, list[str]]], nodes: int, where: str, seed: int) -> Trace:
    """`time,count`: the number of nodes as a step curve; which of them go is drawn from `seed`."""
    unit_s = 3600.0 if any("." in row[0] for _, row in rows) else 1.0
    rng = np.random.default_rng([seed, 5])
    present: list[int] = []
    free = list(range(nodes - 1, -1, -1))
    found: list[Happening] = []
    absent = set(range(nodes))
    time = 0.0
    for number, row in rows:
        count = whole(row[1]) if len(row) == 2 else None
        if count is None:
            raise UsageError(f"{where}: line {number}: {quoted(','.join(row))}, expected time,count")
        time = _time(row[0], unit_s, time, where, number)
        if count > nodes:
            raise UsageError(
                f"{where}: line {number}: {count} nodes, expected at most cluster.nodes = {nodes}"
            )
        while len(present) < count:
            node = free.pop()
            present.append(node)
            if time == 0:
                absent.discard(node)
            else:
                found.append(Happening(time, Kind.ADD, node))
        while len(present) > count:
            node = present.pop(int(rng.integers(len(present))))
            free.append(node)
            found.append(Happening(time, Kind.REMOVE, node))
    return Trace(tuple(found), frozenset(absent))


def parse_faults(text: str, nodes: int, where: str) -> Trace:
    """InfiniteHBD's list of `fault_start` and `fault_end` events, in days; a fault takes its node away."""
    try:
        events = json.loads(text)
    except RecursionError as error:
        raise UsageError(f"{where}: too many brackets within brackets, expected a list of events") from error
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    place: dict[str, int] = {}
    open_faults: dict[str, list[float]] = {}
    found: list[Happening] = []
    time = 0.0
    for number, event in enumerate(events if isinstance(events, list) else [], start=1):
        name, kind = _fault_event(event, where, number)
        time = _time(repr(event["event_time"]), DAY_S, time, where, number)
        if kind == "fault_start":
            place.setdefault(name, len(place))
            open_faults.setdefault(name, []).append(time)
        elif open_faults.get(name):
            start = open_faults[name].pop(0)
            found.append(Happening(start, Kind.FAULT, place[name], 1, Method.NODE, time - start))
        else:
            raise UsageError(f"{where}: event {number}: a fault of {quoted(name)} ends before it starts")
    for name, starts in open_faults.items():
        found.extend(Happening(start, Kind.FAULT, place[name], 1, Method.NODE, FOREVER_S) for start in starts)
    if not found:
        raise UsageError(f"{where}: no fault, expected a list of fault_start and fault_end events")
    if len(place) > nodes:
        raise UsageError(f"{where}: {len(place)} nodes have faults, expected cluster.nodes of at least that")
    found.sort(key=lambda event: event.time_s)
    return Trace(tuple(found))


def _fault_event(event: Any, where: str, number: int) -> tuple[str, str]:
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("node_id"), str)
        or not isinstance(event.get("event_time"), int | float)
        or event.get("event_type") not in ("fault_start", "fault_end")
    ):
        raise UsageError(
            f"{where}: event {number}: expected node_id, event_time and event_type fault_start or fault_end"
        )
    return event["node_id"], event["event_type"]

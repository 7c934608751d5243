"""Reads `events.jsonl` and `metrics.jsonl` of a run directory; nothing else knows their spelling.

A file may end in a torn line, and lines of other programs or later versions may stand in it: what cannot
be read is counted, never fatal, so that a report can always be made of a run that ended badly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `events.jsonl`: what every line has, and the rest in `extra`.

    `wall_s` is in Unix seconds. `worker` is None where the event concerns no single worker.
    """

    name: str
    wall_s: float
    generation: str = ""
    step: int | None = None
    worker: int | None = None
    node: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """A finite number of `extra`, or None."""
        return _number(self.extra.get(key))

    def text(self, key: str) -> str:
        """A value of `extra` as text; empty when it is missing or null."""
        value = self.extra.get(key)
        return "" if value is None else str(value)

    def workers(self, key: str) -> tuple[int, ...]:
        """A list of worker ids in `extra`; empty when it is missing."""
        value = self.extra.get(key)
        return tuple(w for w in value if isinstance(w, int)) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class Commit:
    """One line of `metrics.jsonl`: a committed step. `time` is in Unix seconds."""

    step: int
    time: float
    workers: int
    loss: float | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class Records:
    """Everything a report is made of; `unread` counts the lines that were left out."""

    events: tuple[Event, ...]
    commits: tuple[Commit, ...]
    unread: int = 0


def read_records(run_dir: Path) -> Records:
    """Read both files of `run_dir`; a missing file is an empty one.

    Events are in the order of the file, commits in the order of their steps (the first line of a step
    counts, P18).
    """
    event_lines, torn_events = _lines(run_dir / EVENTS)
    metric_lines, torn_metrics = _lines(run_dir / METRICS)
    events = [event for line in event_lines if (event := _event(line)) is not None]
    commits: dict[int, Commit] = {}
    foreign = 0
    for line in metric_lines:
        commit = _commit(line)
        if commit is None:
            foreign += 1
        else:
            commits.setdefault(commit.step, commit)
    unread = torn_events + torn_metrics + foreign + len(event_lines) - len(events)
    return Records(tuple(events), tuple(commits[step] for step in sorted(commits)), unread)


def _lines(path: Path) -> tuple[Sequence[Mapping[str, Any]], int]:
    """The JSON objects of a file, one a line, and how many lines were none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    found: list[Mapping[str, Any]] = []
    bad = 0
    for line in raw.splitlines():
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError:
            bad += 1
            continue
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += 1
    return found, bad


def _event(line: Mapping[str, Any]) -> Event | None:
    name, wall_s = line.get("event"), _number(line.get("wall_s"))
    if not isinstance(name, str) or wall_s is None:
        return None
    common = ("event", "wall_s", "mono_s", "job", "generation", "step", "worker", "node")
    return Event(
        name=name,
        wall_s=wall_s,
        generation=str(line.get("generation") or ""),
        step=_whole(line.get("step")),
        worker=_whole(line.get("worker")),
        node=str(line.get("node") or ""),
        extra={key: value for key, value in line.items() if key not in common},
    )


def _commit(line: Mapping[str, Any]) -> Commit | None:
    step, time = _whole(line.get("step")), _number(line.get("time"))
    if step is None or time is None:
        return None
    digest = line.get("digest")
    return Commit(
        step=step,
        time=time,
        workers=_whole(line.get("workers")) or 0,
        loss=_number(line.get("loss")),
        digest=digest if isinstance(digest, str) and digest else None,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

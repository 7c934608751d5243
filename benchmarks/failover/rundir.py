"""Follows the files of a running perdure job, and kills workers of it by their process id."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
POLL_S = 0.02


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: when (Unix seconds), and to which worker."""

    time: float
    worker: int
    pid: int


@dataclass
class RunDir:
    """`events` and `commits` as far as they were read."""

    path: Path
    events: list[Line] = field(default_factory=list)
    commits: list[Line] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read what was written since."""
        self.events += self._lines("events.jsonl")
        self.commits += self._lines("metrics.jsonl")

    def _lines(self, name: str) -> list[Line]:
        path = self.path / name
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._read.get(name, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, what: Callable[[], bool], deadline_s: float = 180.0) -> None:
        """Wait until `what` is true of what was read; raises TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while True:
            self.refresh()
            if what():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path}: waited {deadline_s:.0f} s; last event {self.events[-1:]}")
            time.sleep(POLL_S)

    def find(self, name: str, after: float = 0.0, **fields: object) -> list[Line]:
        """The events of that name after a time whose fields are these."""
        return [
            event
            for event in self.events
            if event["event"] == name and event["wall_s"] > after
            if all(event.get(key) == value for key, value in fields.items())
        ]

    @property
    def members(self) -> list[int]:
        """The workers of the newest generation that computes."""
        computing = self.find("generation_computing")
        return list(computing[-1]["members"]) if computing else []

    def pid(self, worker: int) -> int:
        """A worker's process id."""
        return int(self.find("worker_started", worker=worker)[-1]["pid"])

    @property
    def last_step(self) -> int:
        """The newest committed step; −1 for none."""
        return int(self.commits[-1]["step"]) if self.commits else -1

    def wait_steps(self, count: int) -> None:
        """Wait for so many further commits."""
        wanted = self.last_step + count
        self.wait(lambda: self.last_step >= wanted)

    def kill(self, worker: int) -> Kill:
        """SIGKILL a worker now."""
        kill = Kill(time.time(), worker, self.pid(worker))
        os.kill(kill.pid, signal.SIGKILL)
        self.kills.append(kill)
        return kill

    def newcomer(self, kill: Kill) -> int | None:
        """The worker that took the killed one's place, once it is a member."""
        joined = [event["worker"] for event in self.find("joined", kill.time)]
        return joined[0] if joined else None

    def wait_replaced(self, kill: Kill) -> None:
        """Wait until the replacement computes its first micro-batch."""

        def computes() -> bool:
            newcomer = self.newcomer(kill)
            return newcomer is not None and bool(self.find("first_micro_batch", kill.time, worker=newcomer))

        self.wait(computes)

    def step_s(self) -> float:
        """Median of the undisturbed steps: no kill in them, no newcomer at their beginning."""
        joins = {event["base"] + 1 for event in self.find("generation_computing")}
        return statistics.median(
            after["time"] - before["time"]
            for before, after in zip(self.commits, self.commits[1:], strict=False)
            if after["step"] not in joins
            if not any(before["time"] < kill.time < after["time"] for kill in self.kills)
        )

    def stall_s(self, kill: Kill) -> float:
        """(first commit after the kill − last commit before it) − the median step."""
        before = max(commit["time"] for commit in self.commits if commit["time"] <= kill.time)
        after = min(commit["time"] for commit in self.commits if commit["time"] > kill.time)
        return float(after - before - self.step_s())

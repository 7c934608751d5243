"""Lets jobs run in turn: segments of one, then of the other, while the rest stands still.

    worker                                       driver
    Gate(path, job).wait(step_seconds)  ───▶     one line of JSON when the worker reached a gate
                                        ◀───     "go" when it is the job's turn

Both jobs live through the whole measurement, so a pair of segments is a few seconds apart and what else the
machine does meets both alike. Standard library alone: every arm's environment has it.
"""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


class Gate:
    """The worker's side. Records the end of every step; waits at each `segment`-th."""

    def __init__(self, path: str, job: str, segment: int) -> None:
        self._segment = segment
        self._ends: list[tuple[float, float]] = []
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        self._stream: BinaryIO = sock.makefile("rwb", buffering=0)  # type: ignore[assignment]
        self._stream.write(json.dumps({"job": job}).encode() + b"\n")

    def passed(self, step: int) -> None:
        """Step `step` is over."""
        self._ends.append((time.perf_counter(), time.process_time()))
        if (step + 1) % self._segment == 0:
            self._stream.write(json.dumps({"ends": self._ends}).encode() + b"\n")
            self._ends = []
            self._stream.readline()


@dataclass(frozen=True)
class Segment:
    """For each worker the (time, processor time) at the end of each step, in seconds.

    The first step of a segment is left out: it begins at the gate.
    """

    ends: Sequence[Sequence[tuple[float, float]]]

    @property
    def step_s(self) -> float:
        """The median step: of the workers' mean ends, the differences of neighbouring ones."""
        means = [statistics.fmean(end for end, _ in step) for step in zip(*self.ends, strict=True)]
        return statistics.median(after - before for before, after in itertools.pairwise(means))

    @property
    def cpu_s(self) -> float:
        """Processor time of all workers for one step."""
        spent = sum(worker[-1][1] - worker[0][1] for worker in self.ends)
        return spent / (len(self.ends[0]) - 1)


class Turns:
    """The driver's side."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.settimeout(deadline_s)
        self._deadline_s = deadline_s
        self._workers: dict[str, list[BinaryIO]] = {}

    def gather(self, jobs: Sequence[str], workers: int) -> None:
        """Wait until all workers of all jobs have connected."""
        for _ in range(len(jobs) * workers):
            sock, _ = self._listener.accept()
            sock.settimeout(self._deadline_s)
            stream: BinaryIO = sock.makefile("rwb", buffering=0)  # type: ignore[assignment]
            job = json.loads(stream.readline())["job"]
            self._workers.setdefault(job, []).append(stream)

    def arrive(self, job: str) -> Segment:
        """Wait until all workers of the job are at a gate: what they recorded since the last."""
        return Segment([json.loads(stream.readline())["ends"] for stream in self._workers[job]])

    def go(self, job: str) -> None:
        """Let the job run its next segment."""
        for stream in self._workers[job]:
            stream.write(b"go\n")

    def close(self) -> None:
        """Close the sockets."""
        for stream in (stream for streams in self._workers.values() for stream in streams):
            stream.close()
        self._listener.close()

"""`perdure run` started by a test: one launcher, what it printed, what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.ps import ask
from perdure.schema.messages import PsRow

PERDURE = Path(sys.executable).parent / "perdure"
DEADLINE_S = 120.0
_LOOK_S = 0.02


class Launched:
    """A launcher at work in `directory`, with `directory`/run as its run directory unless told otherwise."""

    def __init__(
        self, directory: Path, script: Sequence[object], options: Sequence[object] = (), name: str = "run"
    ) -> None:
        self.directory = directory
        self.run_dir = directory / name
        self._printed = directory / f"{name}.printed"
        with self._printed.open("ab") as output:
            self.process = subprocess.Popen(
                [str(word) for word in (PERDURE, "run", "--run-dir", self.run_dir, *options, *script)],
                cwd=directory,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code; a launcher that does not end in time is killed and fails the test."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {deadline_s:g} s\n{self.story()}")

    def until(self, what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """What `what` gives once that is true."""
        end = time.monotonic() + deadline_s
        while not (found := what()):
            if time.monotonic() > end or self.process.poll() is not None:
                pytest.fail(f"it never came (exit code {self.process.poll()})\n{self.story()}")
            time.sleep(_LOOK_S)
        return found

    def rows(self) -> Sequence[PsRow]:
        """The workers, as `perdure ps` sees them; none before the coordinator is there."""
        try:
            return ask(self.run_dir)
        except Exception:
            return ()

    def active(self) -> list[PsRow]:
        """The members that train."""
        return [row for row in self.rows() if row.state == "active"]

    def events(self, name: str = "", **fields: Any) -> list[dict[str, Any]]:
        """The events of a name that have these values."""
        return [
            event
            for event in lines(self.run_dir / "events.jsonl")
            if event["event"] == (name or event["event"])
            and all(event.get(key) == value for key, value in fields.items())
        ]

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "metrics.jsonl")

    def steps(self) -> list[int]:
        """The steps in metrics.jsonl, in the order of its lines."""
        return [line["step"] for line in self.metrics()]

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def story(self) -> str:
        """What it printed and what happened, for a test that failed."""
        events = [
            f"{event['mono_s']:.3f} {event['event']} {event['generation']} worker={event['worker']} "
            f"{event.get('reason', '')} {event.get('message', '')}"
            for event in self.events()
        ]
        workers = [f"{row}" for row in self.rows()]
        return "\n".join([self.printed[-6000:], *events[-60:], *workers])

    def signal(self, signum: int) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(signum)

    def end(self) -> None:
        """Kill the launcher if it is there still; everything below it goes too."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def launch(
    directory: Path, *script: object, options: Sequence[object] = (), name: str = "run"
) -> Iterator[Launched]:
    """Start a launcher; it is ended with the block."""
    launched = Launched(directory, script, options, name)
    try:
        yield launched
    finally:
        launched.end()


def run(
    directory: Path, *script: object, options: Sequence[object] = (), name: str = "run", code: int = 0
) -> Launched:
    """Run a script to its end, which must have this exit code."""
    with launch(directory, *script, options=options, name=name) as launched:
        found = launched.wait()
    assert found == code, launched.story()
    return launched


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines that may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def digests(directory: Path) -> dict[int, set[str]]:
    """What the workers' own notes say of each step's state: the same from everybody, if all is well."""
    found: dict[int, set[str]] = {}
    for path in directory.glob("*.digests"):
        for line in path.read_text().splitlines():
            step, digest = line.split()[:2]
            found.setdefault(int(step), set()).add(digest)
    return found


def expect(directory: Path, reference: Mapping[int, str]) -> None:
    """Every step was committed somewhere, and everywhere with the reference's bits."""
    assert digests(directory) == {step: {digest} for step, digest in reference.items()}

"""The run directory's files that the coordinator writes: job.json, metrics, samples, events.

Each has one writer. Lines are whole or absent: a torn tail is cut off when the run is resumed. A step is
known by its line in metrics.jsonl, which comes after its lines in samples.jsonl; samples without it are cut
off too, as they will come again.

A disk that is full, or gone, stops nobody: what cannot be written waits in memory, and the people are told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from perdure.coordinator.journal import Journal
from perdure.schema.errors import UsageError
from perdure.schema.plan import Record

JOB, METRICS, SAMPLES, EVENTS, LOCK = "job.json", "metrics.jsonl", "samples.jsonl", "events.jsonl", ".lock"
COMMITTED_EVERY_S = 1.0
LINE_BYTES_MAX = 1 << 16
LOCK_S = 2.0
"""A launcher that was killed a moment ago may hold its lock for so long."""


class JobFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stays with the job over all its runs (P9: the incarnation is on disk before it is used)."""

    incarnation: int = 0
    key: str = ""
    blocks: int = 0
    next_worker: int = 0
    given_up: tuple[int, ...] = ()
    script: tuple[str, ...] = ()


def make(path: Path) -> None:
    """Make a run directory if it is absent. Raises UsageError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise unusable(path, OSError(error.errno, error.strerror)) from error


def unusable(path: Path, error: OSError) -> UsageError:
    """The error of a run directory in which something cannot be read or written."""
    where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
    return UsageError(
        f"run: the run directory {path} cannot be used: {error.strerror}{where}; "
        "give --run-dir a directory that can be written, or a place where one can be made"
    )


def lock(path: Path) -> BinaryIO:
    """Take a run directory for this process, until the file is closed or the process ends.

    Raises UsageError if another process has it: two runs would write over one another.
    """
    try:
        file = open(path / LOCK, "a+b")  # noqa: SIM115 (until the run's end)
    except OSError as error:
        raise unusable(path, error) from error
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(LOCK_S / 20)
                continue
            file.seek(0)
            holder = file.read(20).decode(errors="replace")
            file.close()
            raise UsageError(
                f"run: a run is going on in {path} (launcher {holder}): end it first, or give another "
                "--run-dir; `perdure ps` shows its workers"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            break  # a file system without locks
    try:
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()
        raise unusable(path, error) from error
    return file


class RunDir:
    """Writes below one run directory. `say` tells people when that fails, and when it works again.

    Raises UsageError or OSError if it cannot be used from the start.
    """

    def __init__(self, path: Path, name: str, say: Callable[[str], None]) -> None:
        self.path = path
        self.name = name
        self._say = say
        self._failing = False
        self._unkept = False
        path.mkdir(parents=True, exist_ok=True)
        self._identity = _identity(path)
        self.gone = False
        """Whether the directory was removed while this was at work (another may have its name now)."""
        self.job = self._read_job()
        self.digests = self._resume_metrics()
        for file in (SAMPLES, EVENTS):
            _cut_torn_tail(path / file)
        _cut_after(path / SAMPLES, self.last_step)
        self.cut_off = _is_cut_off(path / EVENTS)
        """Whether the run before was not ended in order: its launcher was killed, or the machine lost."""
        self._metrics, self._events, self._samples = (Journal(path / f) for f in (METRICS, EVENTS, SAMPLES))
        self._metrics.write()
        self._events.write()
        self._committed_at = 0.0

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl, −1 for none."""
        return max(self.digests, default=-1)

    def begin(self, script: tuple[str, ...]) -> JobFile:
        """Take the next incarnation and keep it before it is used. Raises OSError."""
        key, number = self.job.key or secrets.token_hex(8), self.job.incarnation + 1
        self.job = msgspec.structs.replace(self.job, incarnation=number, key=key, script=script)
        self._keep()
        return self.job

    def keep(self, job: JobFile) -> None:
        """Replace job.json, whole or not at all: later, if it cannot be written now."""
        self.job, self._unkept = job, True
        self._write()

    def _keep(self) -> None:
        aside = self.path / f".{JOB}"
        with open(aside, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.job), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / JOB)
        self._unkept = False

    def record(self, record: Record) -> None:
        """Append a step's samples' lines, then its line."""
        for micro_batch, worker, ids in record.samples:
            self._samples.add({"step": record.step, "micro_batch": micro_batch, "worker": worker, "ids": ids})
        line: dict[str, Any] = {
            "step": record.step,
            "loss": record.loss,
            "digest": record.digest,
            "time": record.time,
            "workers": record.workers,
            **record.logged,
        }
        self._metrics.add(line)
        self._write()
        now = time.monotonic()
        if now - self._committed_at >= COMMITTED_EVERY_S:
            self._committed_at = now
            self.event("committed", {"step": record.step})

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Append an event; the common fields are always there."""
        common: dict[str, Any] = {
            "event": name,
            "wall_s": time.time(),
            "mono_s": time.monotonic(),
            "job": self.name,
            "generation": None,
            "step": None,
            "worker": None,
            "node": None,
        }
        self._events.add({**common, **fields})
        self._write()

    def close(self) -> None:
        """Close all files; say what could not be written."""
        self._write()
        for file in (self._samples, self._metrics, self._events):
            file.close()
            if file.lacks and not self.gone:
                self._say(f"the last {file.lacks} bytes of {file.path} could not be written and are lost")

    def _write(self) -> None:
        """Bring everything that waits to the disk; what fails waits on."""
        if self.gone:
            return
        if _identity(self.path) != self._identity:
            self.gone = True
            self._say(
                f"the run directory {self.path} was removed, its metrics, events and checkpoints are lost; "
                "training goes on"
            )
            return
        try:
            if self._samples.lacks:
                self._samples.write()
            self._metrics.write()  # after its samples: a step is known by its line here
            self._events.write()
            if self._unkept:
                self._keep()
        except OSError as error:
            if not self._failing:
                self._say(
                    f"{self.path} cannot be written ({error.strerror}); training goes on, metrics and events "
                    "wait in memory"
                )
            self._failing = True
        else:
            if self._failing:
                self._say(f"{self.path} can be written again; nothing was lost")
            self._failing = False

    def _read_job(self) -> JobFile:
        path = self.path / JOB
        try:
            return msgspec.json.decode(path.read_bytes(), type=JobFile)
        except FileNotFoundError:
            return JobFile()
        except (msgspec.DecodeError, OSError) as error:
            raise UsageError(
                f"{path} cannot be read ({error}); is this a run directory? bring back an older copy of the "
                "file, or start anew with --fresh, which removes the checkpoints too"
            ) from error

    def _resume_metrics(self) -> dict[int, str]:
        path = self.path / METRICS
        _cut_torn_tail(path)
        digests: dict[int, str] = {}
        if path.exists():
            with open(path, "rb") as file:
                for line in file:
                    try:
                        found = msgspec.json.decode(line, type=_Line)
                    except msgspec.DecodeError:
                        continue
                    digests.setdefault(found.step, found.digest)
        return digests


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a directory from another that has its name later; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class _Line(msgspec.Struct):
    step: int
    digest: str = ""


def _cut_after(path: Path, last_step: int) -> None:
    """Drop the lines from the first one on that is of a later step; lines are in the order of steps.

    A line that cannot be read, damaged by others, stays where it is.
    """
    if not path.exists():
        return
    kept = 0
    with open(path, "r+b") as file:
        for line in file:
            try:
                step = msgspec.json.decode(line, type=_Line).step
            except msgspec.DecodeError:
                step = -1
            if step > last_step:
                file.truncate(kept)
                return
            kept += len(line)


def _is_cut_off(path: Path) -> bool:
    """Whether the last run that was started has no end among the last events."""
    try:
        with path.open("rb") as file:
            file.seek(-min(LINE_BYTES_MAX, path.stat().st_size), os.SEEK_END)
            tail = file.read()
    except OSError:
        return False
    return bool(tail) and tail.rfind(b'"event":"run_ended"') <= tail.rfind(b'"event":"run_started"')


def _cut_torn_tail(path: Path) -> None:
    """Drop a last line that was not written whole."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            position = size
            while position > 0:
                step = min(4096, position)
                file.seek(position - step)
                found = file.read(step).rfind(b"\n")
                if found >= 0:
                    file.truncate(position - step + found + 1)
                    return
                position -= step
            file.truncate(0)
    except FileNotFoundError:
        return

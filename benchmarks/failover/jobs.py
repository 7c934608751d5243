"""Starting the arms, with every command and setting printed, and ending what was started."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
from settings import WORKERS, Workload

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PYTHON = Path(sys.executable)
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "examples")}
"""The environment that every arm gets on top of the driver's."""


commands: list[str] = []
"""Every command that was started, as it could be typed; the names of temporary files left out."""


class Started:
    """One job: a launcher in a session of its own; leaving the context ends what is left of it."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, extra: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        settings = {**SETTINGS, **(extra or {})}
        words = [str(word) for word in command]
        self.command = shlex.join([*(f"{name}={value}" for name, value in settings.items()), *words])
        print(f"$ {self.command}", flush=True)
        commands.append(re.sub(r"\S*/perdure-bench-\w+/", "DIR/", self.command).replace(f"{REPOSITORY}/", ""))
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left of the job: torchrun's workers outlive it, in sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def finish(self, timeout_s: float) -> None:
        """Wait for a clean end; raises RuntimeError with the log's tail if it is another."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            tail = self.log.read_text(errors="replace")[-3000:]
            state = "did not end" if code is None else f"ended with {code}"
            raise RuntimeError(f"{self.command}\n{state}:\n{tail}")


def perdure(
    workload: Workload,
    run_dir: Path,
    steps: int,
    *options: str,
    launcher: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> Started:
    """perdure's job; `launcher` are arguments of `perdure run`, `options` of the script."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(PYTHON.with_name("perdure"), "run", "--nproc-per-node", str(WORKERS), "--run-dir", run_dir),
        *launcher,
        *(HERE / "train_perdure.py", *workload.arguments(), "--steps", str(steps), *options),
    ]
    return Started(command, run_dir.with_suffix(".log"), extra)


def ddp(
    workload: Workload,
    log: Path,
    steps: int,
    *options: str,
    launcher: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> Started:
    """DDP's job under torchrun, which gets `extra` in its environment."""
    command = [
        *(PYTHON.with_name("torchrun"), "--standalone", "--nproc-per-node", str(WORKERS), *launcher),
        *(HERE / "train_ddp.py", *workload.arguments(), "--steps", str(steps), *options),
    ]
    return Started(command, log, extra)

"""Hard state from the worker's side: copy at a boundary, write aside in the background (P18).

What is written is published by the coordinator, which knows whether this worker is still a member and
whether the digest is everybody's. One checkpoint is written at a time.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import torch

from perdure.schema import messages as msg
from perdure.schema.errors import PerdureError
from perdure.state import checkpoint
from perdure.state.capture import Snapshot, touched_slab
from perdure.state.shelf import Meta, Shelf, aside, read_manifest, taken
from perdure.worker import defect
from perdure.worker.runtime import Runtime


class Saver:
    """Writes checkpoints of one worker."""

    def __init__(self, runtime: Runtime, seed: int, data: dict[str, int]) -> None:
        self._runtime = runtime
        self._training = runtime.training
        self._writer = f"w{runtime.member.worker}"
        self._shape = runtime.member.shape
        self._seed = seed
        self._data = data
        self._send = runtime.tell
        self._thread: threading.Thread | None = None
        self._slab: torch.Tensor | None = None
        self._writes = 0

    def meta(self, step: int, digest: str) -> Meta:
        """What a checkpoint says of itself."""
        return Meta(
            step=step,
            digest=digest,
            blocks=self._shape.blocks,
            per_step=self._shape.per_step,
            seed=self._seed,
            data=self._data,
        )

    def difference(self, found: Meta) -> str:
        """What decides bits and was another when a checkpoint was written, in words."""
        here = self.meta(found.step, found.digest)
        pairs = [(n, getattr(found, n), getattr(here, n)) for n in ("blocks", "per_step", "seed")]
        pairs += [(name, found.data.get(name, value), value) for name, value in here.data.items()]
        return ", ".join(f"{name} {was}, now {now}" for name, was, now in pairs if was != now)

    def prepare(self) -> None:
        """A checkpoint is coming: have memory at hand whose pages exist, so that the copy is quick."""
        if self._slab is None and self._thread is None:
            nbytes = self._training.state.slab_bytes
            self._thread = threading.Thread(target=defect.fatal(self._touch), args=(nbytes,), daemon=True)
            self._thread.start()

    def _touch(self, nbytes: int) -> None:
        self._slab = touched_slab(nbytes)

    def save(self, step: int, directory: Path) -> None:
        """Copy the state after `step` now; write it in the background, and say when it is done."""
        if self._thread is not None:
            self._thread.join()
        try:
            copy = self._training.snapshot(self._slab)
            self._slab = copy.slab
            if self._runtime.member.broke_off or step + 1 >= self._shape.until:
                copy = copy.without_modes()  # `eval()` for what follows the loop is not for a longer run
        except (PerdureError, MemoryError, RuntimeError) as error:
            self._send(msg.CheckpointFailed(step, f"{type(error).__name__}: {error}"))
            return
        self._thread = threading.Thread(
            target=defect.fatal(self._write),
            args=(copy, step, directory),
            name="perdure-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def save_to(self, step: int, index: int, target: Path) -> str:
        """Write the state after `step` and wait until it lies at `target`; returns why not, if so.

        `index` is the number of the task in the step's commit.
        """
        partial = aside(target, self._writer)
        try:
            if reason := taken(target):
                return reason
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            copy = self._training.snapshot()
            meta = self.meta(step, copy.digest())
            checkpoint.write(copy, partial, meta)
        except OSError as error:
            return error_text(error)
        runtime, inbox, asked = self._runtime, self._runtime.inbox, -1
        while True:
            with runtime.lock:
                inbox.saves = [a for a in inbox.saves if (a.step, a.index) == (step, index)]
                answer = inbox.saves.pop() if inbox.saves else None
                seals = runtime.seals
            if answer is not None:
                if answer.reason:
                    shutil.rmtree(partial, ignore_errors=True)
                return answer.reason
            if asked >= 0 and not _holds(partial, meta):
                return ""  # an earlier coordinator put it in place, and died before it said so
            asked = seals
            self._send(msg.SaveRequest(step, index, str(partial), str(target)))
            runtime.wait_for_answer(lambda: bool(inbox.saves), asked)

    def _write(self, copy: Snapshot, step: int, directory: Path) -> None:
        started = time.monotonic()
        self._writes += 1
        try:
            digest = copy.digest()
            partial = Shelf(directory).partial(step, f"{self._writer}.{self._writes}")
            checkpoint.write(copy, partial, self.meta(step, digest))
        except (OSError, PerdureError) as error:
            self._send(msg.CheckpointFailed(step, f"{type(error).__name__}: {error}"))
            return
        seconds = time.monotonic() - started
        self._send(msg.CheckpointWritten(step, digest, str(partial), copy.total_bytes, seconds))


def error_text(error: OSError) -> str:
    """What went wrong, and where, without a number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def _holds(path: Path, meta: Meta) -> bool:
    try:
        return read_manifest(path).meta == meta
    except ValueError:
        return False

"""The worker's end of the progress page (layout: `schema.progress`)."""

from __future__ import annotations

import mmap

from perdure.schema.progress import PAGE_BYTES, RECORD, Phase, Snapshot, read


class ProgressPage:
    """Written by the main thread alone; one write takes under a microsecond and no lock.

    `fd` is the memory that the agent reads; None makes a private page, so that a script that runs alone
    needs no second code path.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._page = mmap.mmap(-1 if fd is None else fd, PAGE_BYTES)
        self._counter = 0

    def write(self, phase: Phase, step: int = -1, micro_batch: int = -1, samples: int = 0) -> None:
        """What the main thread does from now on; `samples` counts all that it has computed so far."""
        self._counter = counter = self._counter + 1
        RECORD.pack_into(self._page, 0, counter, phase, step, micro_batch, samples, counter)

    def read(self) -> Snapshot | None:
        """What was written last."""
        with memoryview(self._page) as page:
            return read(page)

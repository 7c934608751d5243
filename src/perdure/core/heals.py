"""Whether workers that took their state from a peer stay equal to the others afterwards (E14). Pure.

State that the script keeps and `job.protect` does not know, an average or a counter, is not healed: then a
joiner's state differs from the others' after the first step that it commits, and so does that of the
worker that replaces it, without end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from perdure.schema.ids import WorkerId

IN_A_ROW_MAX = 2
"""So many joiners in a row that differ at once are no accident."""

CAUSE = (
    "workers that took their state from a peer differed from it after their first step, twice in a row: "
    "the script keeps state that job.protect does not know (an average, a counter, a generator or an "
    "optimizer made later) "
    "and that decides what a step does; protect it too"
)


class Heals:
    """Joiners that have not been proved yet, and how many in a row were refuted."""

    def __init__(self) -> None:
        self.unproved: dict[WorkerId, int] = {}
        self._in_a_row = 0

    def joined(self, workers: Iterable[WorkerId], base: int) -> None:
        """These took, or take, the state after step `base` from a peer."""
        self.unproved.update(dict.fromkeys(workers, base))

    def agreed(self, step: int) -> None:
        """All members had the same state after `step`, and compared it."""
        proved = [worker for worker, base in self.unproved.items() if base < step]
        for worker in proved:
            del self.unproved[worker]
        if proved:
            self._in_a_row = 0

    def refuted(self, workers: Collection[WorkerId]) -> bool:
        """These differed from the others; true if there must be a cause that goes on."""
        fresh = [worker for worker in workers if self.unproved.pop(worker, None) is not None]
        self._in_a_row = self._in_a_row + 1 if fresh else 0
        return self._in_a_row >= IN_A_ROW_MAX

    def lost(self, worker: WorkerId) -> None:
        """A worker is gone, for whatever reason."""
        self.unproved.pop(worker, None)

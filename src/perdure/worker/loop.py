"""What `job.steps` returns.

`break` ends a generator at once only where nothing else than the loop refers to it. Scripts have a name for
what they iterate, as a progress bar around it has; so that is not the generator, and the loop gets that.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator

from perdure.schema.errors import UsageError
from perdure.worker.step import Step


class Loop(Iterator[Step]):
    """To be iterated once."""

    def __init__(self, steps: Generator[Step, None, None]) -> None:
        self._steps: Generator[Step, None, None] | None = steps
        self._given = weakref.ref(steps)

    def _held(self) -> Generator[Step, None, None]:
        if self._steps is None:
            raise UsageError("what job.steps returned is iterated a second time: a job is one loop")
        return self._steps

    def __iter__(self) -> Iterator[Step]:
        steps, self._steps = self._held(), None
        return steps

    def close(self) -> None:
        """As `break` does."""
        if (steps := self._given()) is not None:
            steps.close()

    def __next__(self) -> Step:
        return next(self._held())

"""What a worker's death means: replace it, or end the run (G7). Pure.

- The same exception type at the same innermost line of the user's code again before a further commit is
  the user's error, and so is one that every worker raises in one step.
- A death without an exception (signal, exit code) that repeats at start-up, before any worker reached its
  first step, is a crash loop.
- Every worker lost, several times in a row without a further commit or a newer checkpoint, is a crash loop
  however they ended; so is a place whose worker is lost as often after the last step, and a micro-batch of
  which one worker after the other ends.
- Everything else is a fault: SEV2 (restart the process), within a budget.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

LOOP_LIMIT = 3
"""So many deaths in a row at start-up, each of a worker started after the one before, are a crash loop."""


ALL_LOST_LIMIT = 5
"""So many times in a row every worker was lost, without progress in between: a crash loop."""

POISON_LIMIT = 10
"""So many workers that ended alike at one micro-batch of a step; a few may be chance, these are not."""


@dataclass(frozen=True)
class Death:
    """How a worker ended. `where` is the innermost line of the user's code, empty without an exception.

    `last_lines` are those of its stderr, as far as they are known yet.
    """

    kind: str
    exit_code: int | None
    signal: int | None
    exception: str = ""
    where: str = ""
    message: str = ""
    refused: bool = False
    last_lines: str = ""

    @property
    def signature(self) -> tuple[str, str]:
        """What makes two deaths the same."""
        if self.exception:
            return (self.exception, self.where)
        return (self.kind, f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}")


@dataclass(frozen=True)
class Decision:
    """The answer to a death: `action` is of DESIGN §7; a `stop` has an exit code and a message."""

    severity: str
    action: str
    exit_code: int = 0
    message: str = ""


class Failures:
    """The failure budget and the memory of what already happened."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.count = self._forgiven = 0
        self._since_progress: set[tuple[str, str]] = set()
        self._at_start = 0
        self._last_at_start: tuple[str, str] | None = None
        self._all_lost = 0
        self._newest = -1
        self._tails: Counter[tuple[str, int]] = Counter()
        self._at: Counter[tuple[tuple[str, str], int, int]] = Counter()
        self._last: Death | None = None

    def progress(self, further: bool = True) -> None:
        """A step was committed: earlier errors are over. `further`: no earlier life of the job came to it.

        A job that loses everybody again and again on the way to where it was makes no progress by that.
        """
        self._since_progress.clear()
        self._at.clear()
        self._at_start = 0
        if further:
            self._all_lost = 0

    def checkpoint(self, step: int) -> None:
        """A checkpoint of the state after `step` is in place: later lives begin there."""
        if step > self._newest:
            self._newest, self._all_lost = step, 0

    def reached_first_step(self) -> None:
        """Some worker got through its start-up."""
        self._at_start = 0

    def all_lost(self, step: int) -> Decision:
        """Every member is lost, whoever and however; `step` is the last that one of them had in hand."""
        self._all_lost += 1
        if self._all_lost < ALL_LOST_LIMIT:
            return Decision("SEV2", "replace")
        how = f"; the last one {self._last.message}" if self._last else ""
        text = f"every worker was lost {self._all_lost} times in a row, none beyond step {step}{how}"
        return Decision("SEV1", "stop", 1, text)

    def at_micro_batch(self, death: Death, step: int, micro_batch: int) -> Decision:
        """A worker ended with this micro-batch in hand: another takes it over, and may end of it too."""
        self._at[death.signature, step, micro_batch] += 1
        count = self._at[death.signature, step, micro_batch]
        if count < POISON_LIMIT:
            return Decision("SEV2", "replace")
        text = f"{count} workers, one after the other, ended at micro-batch {micro_batch} of step {step}"
        return Decision("SEV2", "stop", 1, f"{text}; the last one {death.message}")

    def tail_lost(self, place: tuple[str, int], death: Death) -> Decision:
        """A worker was lost after the last step, and its place has not brought the script to its end yet."""
        self._tails[place] += 1
        if self._tails[place] < ALL_LOST_LIMIT:
            return Decision("SEV2", "replace")
        text = f"{self._tails[place]} workers in a row were lost after the last step, before the script ended"
        return Decision("SEV2", "stop", 1, f"{text}; the last one {death.message}")

    def judge(
        self, death: Death, reached_first_step: bool, in_training: bool = False, again: bool = True
    ) -> Decision:
        """Decide what a death means; counts it.

        With others `in_training` a start-up that fails, however often, costs them nothing: it neither ends
        the job nor counts against its budget. `again` says that this worker was started after the last that
        ended at start-up; those that were started together and end together show one failure of the
        start-up, not several.
        """
        self.count += 1
        self._last = death
        at_start = not reached_first_step and death.kind != "node"
        if at_start and in_training:
            self._forgiven += 1
            return Decision("SEV2", "replace")
        if death.refused:
            return Decision("SEV2", "stop", death.exit_code or 4, death.message)
        repeated = bool(death.exception) and death.signature in self._since_progress
        self._since_progress.add(death.signature)
        if repeated:
            return Decision(
                "SEV2",
                "stop",
                1,
                f"{death.exception} at {death.where} again without progress: an error of the script",
            )
        if at_start:
            if death.signature != self._last_at_start:
                self._at_start = 1
            elif again:
                self._at_start += 1
            self._last_at_start = death.signature
            if self._at_start >= LOOP_LIMIT:
                what = " ".join(death.signature) if death.exception else death.signature[1]
                if death.exit_code is None and death.signal is None:
                    what = death.message
                if death.exit_code == 0:
                    what += "; a script that joins the job must come to its loop over job.steps"
                return Decision(
                    "SEV2",
                    "stop",
                    1,
                    f"{self._at_start} workers in a row ended at start-up, before job.steps began: {what}",
                )
        spent = self.count - self._forgiven
        if spent > self.max_failures:
            return Decision(
                "SEV1", "stop", 3, f"{spent} failures, more than --max-failures {self.max_failures}"
            )
        return Decision("SEV2", "replace")

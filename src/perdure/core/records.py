"""The one writer's view of metrics.jsonl: every step once, in order (P18). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.schema.plan import Record


@dataclass(frozen=True)
class Write:
    """Append this line."""

    record: Record


@dataclass(frozen=True)
class Differs:
    """A step that is in the file already came again with another digest."""

    step: int
    was: str
    now: str


class Records:
    """Puts records in order and drops repetitions."""

    def __init__(self, last: int = -1, digests: dict[int, str] | None = None) -> None:
        """
        Args:
            last: the last step in the file, −1 for an empty one.
            digests: step → digest of the lines in the file. `agreed` starts as these, and is what the
                members agreed on last: an unseeded script that had to begin anew has other states.
        """
        self.last = last
        self.digests = dict(digests or {})
        self.agreed = dict(self.digests)
        self._waiting: dict[int, Record] = {}

    def add(self, record: Record) -> list[Write | Differs]:
        """Take a record in; what can be written now, in order."""
        step = record.step
        if step <= self.last:
            self.agreed[step] = record.digest
            was = self.digests.get(step, "")
            return (
                [Differs(step, was, record.digest)] if was and record.digest and was != record.digest else []
            )
        self._waiting.setdefault(step, record)
        out: list[Write | Differs] = []
        while self.last + 1 in self._waiting:
            ready = self._waiting.pop(self.last + 1)
            self.last += 1
            self.digests[self.last] = self.agreed[self.last] = ready.digest
            out.append(Write(ready))
        return out

    def agree(self, step: int, digest: str) -> None:
        """All members have this state after `step`, whose line is in the file."""
        self.agreed[step] = digest

    def restart(self, step: int) -> None:
        """Everybody was lost, and training begins after `step`: what was beyond is of a life that is over."""
        self._waiting.clear()
        self.forget(step)

    def forget(self, step: int) -> None:
        """Members stand at `step`: what was agreed on for later ones was so in a life that is over."""
        self.agreed = {s: digest for s, digest in self.agreed.items() if s <= step}

    def resumed(self, step: int) -> None:
        """Training goes on after `step`, whose lines up to it are known or lost for good.

        A file that ends earlier than the restored state goes on after a gap; a longer one keeps its
        lines (the first line stays), and the steps that come again are compared with them.
        """
        self.last = max(self.last, step)
        self._waiting = {s: record for s, record in self._waiting.items() if s > self.last}

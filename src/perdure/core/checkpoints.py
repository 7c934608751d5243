"""When the protected state is written to disk, and by whom. Pure.

The writer copies its state at a step boundary and writes aside; the coordinator publishes what it wrote
(P18, G4): only from a member, and only once the step's digest is known to be everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass

from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId


@dataclass(frozen=True)
class Ask:
    """Have this worker write the state after `step` (or the next one it commits)."""

    worker: WorkerId
    step: int


@dataclass(frozen=True)
class Publish:
    """Move a checkpoint that was written aside into its place."""

    written: msg.CheckpointWritten


@dataclass(frozen=True)
class Discard:
    """Throw away what was written aside, and say why."""

    written: msg.CheckpointWritten
    reason: str


Action = Ask | Publish | Discard


class Checkpoints:
    """One checkpoint at a time: asked for, written, agreed upon, published."""

    def __init__(self, every: int | None, every_s: float = 60.0) -> None:
        """
        Args:
            every: a checkpoint after each `every` steps; 0 turns them off; None: by time.
            every_s: seconds between checkpoints by time.
        """
        self.every = every
        self.every_s = every_s
        self.last = -1
        self.asked: tuple[WorkerId, int] | None = None
        self._written: msg.CheckpointWritten | None = None
        self._writer: WorkerId | None = None
        self._before = -1
        self._final: int | None = None
        self._last_s: float | None = None

    @property
    def off(self) -> bool:
        """Whether there are to be no checkpoints at all."""
        return self.every == 0

    def due(self, committed: int, writer: WorkerId | None, now: float) -> list[Action]:
        """Ask for the next checkpoint if it is time; `committed` is the last step known committed."""
        if self._last_s is None:
            self._last_s = now
        if self.off or writer is None or self.asked is not None or self._written is not None:
            return []
        if self.every is not None:
            step = max((committed + 2 + self.every - 1) // self.every, 1) * self.every - 1
        elif now - self._last_s >= self.every_s:
            step = committed + 1
        else:
            return []
        self.asked = (writer, step)
        return [Ask(writer, step)]

    def final(self, step: int, writer: WorkerId) -> list[Action]:
        """Ask for the last state, at the end, unless it is being written or waits to be published.

        A writer that was asked before answers that first: it may have come to it so late that it wrote this
        very state, and it must not do so twice. A later step it will never come to.
        """
        if self._written is not None and self._written.step == step:
            return []
        if self.asked is not None and self.asked[0] == writer and self.asked[1] <= step:
            self._final = step
            return []
        self.asked, self._written = (writer, step), None
        return [Ask(writer, step)]

    def written(
        self,
        writer: WorkerId,
        written: msg.CheckpointWritten,
        member: bool,
        digests: dict[int, str],
        now: float,
    ) -> list[Action]:
        """A worker wrote aside; publish when the step is known to be everybody's."""
        then = self._answered(writer, written.step)
        if written.step <= self.last:
            return [*then, Discard(written, f"step {self.last} is in place already")]
        if not member:
            return [*then, Discard(written, "its writer is not a member any more")]
        self._written, self._writer, self._last_s = written, writer, now
        return [*then, *self.known(digests)]

    def known(self, digests: dict[int, str]) -> list[Action]:
        """Steps' digests as far as they are agreed upon: something may be published now."""
        written = self._written
        if written is None or written.step not in digests:
            return []
        self._written = None
        agreed = digests[written.step]
        if agreed and written.digest and agreed != written.digest:
            return [Discard(written, f"its digest {written.digest} is not the agreed {agreed}")]
        self._before, self.last = self.last, written.step
        return [Publish(written)]

    def not_placed(self, step: int) -> None:
        """What was to be published could not be put in its place."""
        if self.last == step:
            self.last = self._before

    def restart(self, step: int) -> list[Action]:
        """The job goes on from the state after `step` (−1: anew): what waits is of a life that is over."""
        self.asked, self._final, self.last, self._before = None, None, step, step
        return self._drop("the job went on from an earlier state")

    def failed(self, writer: WorkerId, step: int, now: float) -> list[Action]:
        """The writer could not write the state after `step`; the next one comes at its time."""
        self._last_s = now
        return self._answered(writer, step)

    def _answered(self, writer: WorkerId, step: int) -> list[Action]:
        """A writer did what it was asked for, or could not; asks for the last state if that is still due."""
        if self.asked is None or self.asked[0] != writer:
            return []
        self.asked, final, self._final = None, self._final, None
        if final is None or step >= final:
            return []
        self.asked = (writer, final)
        return [Ask(writer, final)]

    def lost(self, worker: WorkerId) -> None:
        """What a worker was asked for is lost: ask another when the time comes."""
        if self.asked is not None and self.asked[0] == worker:
            self.asked = self._final = None

    def gone(self, worker: WorkerId) -> list[Action]:
        """A worker is no more; what it wrote aside goes with it, unless that is being published."""
        self.lost(worker)
        return self._drop("its writer is gone") if self._writer == worker else []

    def _drop(self, reason: str) -> list[Action]:
        written, self._written = self._written, None
        return [Discard(written, reason)] if written is not None else []

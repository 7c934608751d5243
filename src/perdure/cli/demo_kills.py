"""Whom the demo kills, and when: the moments as data, and the look-out for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.chaos.faults import Manner
from perdure.chaos.injector import Injector
from perdure.cli.spectator import Spectator
from perdure.schema.ids import WorkerId
from perdure.schema.progress import Phase, Snapshot

PATIENCE_STEPS = 2
"""A moment that does not come within so many steps is not waited for: the kill comes anyway."""


@dataclass(frozen=True)
class Strike:
    """Kill one of the first workers from step `since` on, when it is in `phase`.

    With `newcomer` it is the newest replacement that has to be in `phase`: the kill then hits the job
    while it is still mending the one before.
    """

    since: int
    phase: Phase
    newcomer: bool = False


@dataclass(frozen=True)
class Struck:
    """A kill: whom, at what Unix time, and what victim and newcomer were doing as told by their pages."""

    worker: WorkerId
    pid: int
    time: float
    doing: Snapshot
    newcomer: tuple[WorkerId, Phase] | None


@dataclass
class Hunter:
    """Carries the strikes out, in their order. `workers` is everybody who was ever started, with its pid."""

    spectator: Spectator
    strikes: Sequence[Strike]
    first: int
    workers: dict[WorkerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left = deque(self.strikes)
        self._victims = list(range(self.first))
        self._since: int | None = None

    @property
    def done(self) -> bool:
        """Whether every strike was carried out."""
        return not self._left

    def look(self) -> Struck | None:
        """Strike if the moment is here. Looks once; call it often."""
        if not self._left or len(self.workers) < self.first or not self._victims:
            return None
        strike, victim = self._left[0], self._victims[-1]
        doing = self.spectator.doing(self.workers[victim])
        newest = max(self.workers)
        newcomer = self.spectator.doing(self.workers[newest]) if newest >= self.first else None
        if doing is None or doing.step < strike.since:
            return None
        if self._since is None:
            self._since = doing.step
        watched = newcomer if strike.newcomer else doing
        if (watched is None or watched.phase is not strike.phase) and not self._too_late(doing.step):
            return None
        return self._strike(victim, newest if newcomer is not None else None)

    def _too_late(self, step: int) -> bool:
        return self._since is not None and step - self._since >= PATIENCE_STEPS

    def _strike(self, victim: WorkerId, newest: WorkerId | None) -> Struck | None:
        self._left.popleft()
        self._victims.pop()
        self._since = None
        pid = self.workers[victim]
        with Injector() as injector:
            hit = injector.strike(pid, Manner.KILL)
        now = time.time()
        doing = self.spectator.doing(pid)
        newcomer = self.spectator.doing(self.workers[newest]) if newest is not None else None
        if not hit or doing is None:
            return None
        mending = (newest, newcomer.phase) if newest is not None and newcomer is not None else None
        return Struck(victim, pid, now, doing, mending)

"""Faults as data: moment × manner × target. Nothing here carries one out."""

from __future__ import annotations

import enum

import msgspec

from perdure.schema.ids import WorkerId


class Moment(enum.StrEnum):
    """What a worker is in the middle of when it is hit."""

    START_UP = "script start-up"
    FIRST_GROUP = "before the first group is formed"
    DATA_FETCH = "data fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "overlapped reduce"
    FOLD = "fold"
    GATHER = "gather"
    LEAVING = "leaving the step"
    OPTIMIZER = "optimizer step"
    BETWEEN = "between commit and next step"
    DONOR = "while a donor"
    JOINER = "while a joiner"
    RECOVERY = "during the recovery from another loss"
    CHECKPOINT = "during a checkpoint"
    LAST_STEP = "on the last step"
    AFTER_LAST = "after the last commit"


class Manner(enum.StrEnum):
    """How a worker is hit."""

    KILL = "kill"
    EXIT = "exit"
    RAISE = "raise"
    SEGV = "segv"
    TERM = "term"
    STOP = "stop"


SIGNALS = (Manner.KILL, Manner.TERM, Manner.STOP, Manner.SEGV)
"""What an outside process can do to a worker."""

DEATHS = (Manner.KILL, Manner.EXIT, Manner.RAISE, Manner.SEGV, Manner.TERM)
"""What ends a worker; SIGTERM only after it has handed over at a boundary."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a fault hits: the first worker that comes to its moment and is all of this; None fits any.

    `since` is the first step that will do, `rank` the place in the plan that the worker works under.
    """

    since: int | None = None
    rank: int | None = None
    worker: WorkerId | None = None

    def fits(self, step: int | None, rank: int | None, worker: WorkerId) -> bool:
        """Whether a worker that is at `step` (None: before any) is meant."""
        late_enough = self.since is None or (step is not None and step >= self.since)
        return late_enough and self.rank in (None, rank) and self.worker in (None, worker)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. It strikes once, in one worker.

    `nth` counts a worker's comings to the moment; `after` names a fault that has to have struck before;
    `also` is how many other workers are killed in the same instant, wherever they are.
    """

    name: str
    moment: Moment
    manner: Manner
    target: Target = Target()
    nth: int = 1
    after: str = ""
    also: int = 0

"""The kill matrix as data: which scenario hits which cell.

A run takes one moment and all five manners where that is sound, one after the other, with everybody back
between two faults. What can happen only once in a run (its first group, its last step) takes a run for
each manner. Two losses at once, and losses down to one worker, are runs of their own at every moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from perdure.chaos.faults import DEATHS, Fault, Manner, Moment, Target
from scenario import Scenario

MEMBERS = 4
ONCE = (Moment.FIRST_GROUP, Moment.LAST_STEP, Moment.AFTER_LAST)
"""Moments that a run has one of."""

AFTER_A_LOSS = (Moment.DONOR, Moment.JOINER, Moment.RECOVERY)
"""Moments that only another loss brings about."""

CHECKPOINT_EVERY = 6


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: its scenario, its length, and the options of `perdure run`."""

    name: str
    scenario: Scenario
    steps: int
    options: tuple[str, ...] = ()
    task: str = "gpt"
    compute_ms: int = 0


def cell(moment: Moment, manner: Manner) -> Run:
    """The run that hits a cell; its fault has the manner's name."""
    if moment in ONCE:
        return _once(moment, manner)
    if moment is Moment.START_UP:
        return _start_up()
    if moment is Moment.CHECKPOINT:
        return _checkpoint()
    return _spread(moment)


def _spread(moment: Moment) -> Run:
    """Five faults, each at a rank of its own, and for each the loss that brings its moment about."""
    faults: list[Fault] = []
    step = 2
    turn = list(Moment).index(moment)
    for number, manner in enumerate(DEATHS):
        if moment in AFTER_A_LOSS:
            before = _loss(f"before-{manner}", step, rank=(number + turn) % MEMBERS)
            faults += [before, Fault(name=manner, moment=moment, manner=manner, after=before.name)]
            step += 5
        else:
            target = Target(since=step, rank=(number + turn) % MEMBERS)
            faults.append(Fault(name=manner, moment=moment, manner=manner, target=target))
            step += 3
    scenario = Scenario(faults=tuple(faults), whole=True)
    return Run(moment.name, scenario, step + 1, compute_ms=_compute_ms(moment))


def _compute_ms(moment: Moment) -> int:
    """Where a worker is lost while it computes, the others shall be computing still when they learn of it."""
    return 40 if moment in (Moment.DATA_FETCH, Moment.FORWARD, Moment.BACKWARD) else 0


def _loss(name: str, step: int, rank: int, also: int = 0) -> Fault:
    target = Target(since=step, rank=rank)
    return Fault(name=name, moment=Moment.FORWARD, manner=Manner.KILL, target=target, also=also)


def _once(moment: Moment, manner: Manner) -> Run:
    target = Target(worker=1) if moment is Moment.FIRST_GROUP else Target(rank=DEATHS.index(manner) % MEMBERS)
    fault = Fault(name=manner, moment=moment, manner=manner, target=target)
    whole = moment is Moment.FIRST_GROUP
    return Run(f"{moment.name}-{manner}", Scenario(faults=(fault,), whole=whole), 4)


def _start_up() -> Run:
    """A worker dies; its replacement dies at start-up, and so does that one's, in all five manners."""
    faults = [
        Fault(name=manner, moment=Moment.START_UP, manner=manner, target=Target(worker=MEMBERS + number))
        for number, manner in enumerate(DEATHS)
    ]
    return Run("START_UP", Scenario(faults=(_loss("before", 2, rank=3), *faults), whole=True), 6)


def _checkpoint() -> Run:
    faults = [
        Fault(
            name=manner,
            moment=Moment.CHECKPOINT,
            manner=manner,
            target=Target(since=(number + 1) * CHECKPOINT_EVERY - 1),
        )
        for number, manner in enumerate(DEATHS)
    ]
    steps = (len(DEATHS) + 4) * CHECKPOINT_EVERY  # a writer that is asked late writes late
    options = ("--checkpoint-every", str(CHECKPOINT_EVERY))
    return Run("CHECKPOINT", Scenario(faults=tuple(faults), whole=True), steps, options)


def at_once(moment: Moment, losses: int) -> Run:
    """So many workers are lost in one moment. What had to be lost before, is."""
    steps = 8
    options = ("--checkpoint-every", "4") if moment is Moment.CHECKPOINT else ()
    name = f"{moment.name}-{losses}-at-once"
    if moment in (Moment.START_UP, Moment.FIRST_GROUP):  # there are no others yet: each comes to it by itself
        faults = [
            Fault(name=f"{manner}", moment=moment, manner=manner, target=Target(worker=worker))
            for worker, manner in enumerate(DEATHS[:losses], 1)
        ]
        return Run(name, Scenario(faults=tuple(faults), whole=True), steps)
    early = moment not in (*AFTER_A_LOSS, Moment.LAST_STEP, Moment.AFTER_LAST)
    before: tuple[Fault, ...] = ()
    if moment in AFTER_A_LOSS:
        before = (_loss("before", 2, rank=1, also=losses - 1 if moment is Moment.JOINER else 0),)
    fault = Fault(
        name="first",
        moment=moment,
        manner=Manner.KILL,
        target=Target(since=2) if early else Target(),
        after="before" if before else "",
        also=losses - 1,
    )
    whole = moment not in (Moment.LAST_STEP, Moment.AFTER_LAST)
    scenario = Scenario(faults=(*before, fault), whole=whole)
    return Run(name, scenario, steps, options, compute_ms=_compute_ms(moment))


def tight_corners() -> Iterator[Run]:
    """Where two special moments meet, and other places within one."""
    steps = 5
    last = Target(since=steps - 1)
    for moment in (Moment.GATHER, Moment.LEAVING, Moment.OPTIMIZER, Moment.BETWEEN, Moment.CHECKPOINT):
        yield _corner(f"{moment.name}-on-the-last-step", moment, target=last)
    for moment in (Moment.GATHER, Moment.LEAVING, Moment.OPTIMIZER):
        yield _corner(f"{moment.name}-two-on-the-last-step", moment, target=last, also=1)
    for also in range(3):
        last_piece = f"GATHER-of-the-last-piece-and-{also}-more"
        yield _corner(last_piece, Moment.GATHER, target=Target(since=1), nth=2, also=also)
    for nth, where in ((2, "waiting to be released"), (3, "in the script's tail")):
        for manner in (Manner.KILL, Manner.RAISE):
            yield _corner(f"AFTER_LAST-{where}-{manner}", Moment.AFTER_LAST, manner=manner, nth=nth)
    before = _loss("before", 1, rank=0)
    for nth, where in ((2, "reported"), (3, "the group formed")):
        yield _corner(f"RECOVERY-{where}", Moment.RECOVERY, before, nth=nth)
    for moment, nth in ((Moment.DONOR, 5), (Moment.JOINER, 20)):
        yield _corner(f"{moment.name}-late", moment, before, nth=nth, whole=True)


def _corner(name: str, moment: Moment, *before: Fault, whole: bool = False, **fields: Any) -> Run:
    after = before[0].name if before else ""
    fault = Fault(**{"name": "corner", "moment": moment, "manner": Manner.KILL, "after": after, **fields})
    return Run(name, Scenario(faults=(*before, fault), whole=whole), 5)


def losses_at_once(moment: Moment) -> tuple[int, ...]:
    """How many are lost at once: two, and as many as leave one worker."""
    left = MEMBERS - 1 if moment in (Moment.DONOR, Moment.RECOVERY) else MEMBERS
    return (2,) if left - 2 == 1 else (2, 3)

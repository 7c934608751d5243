"""The kill matrix as data: which scenario hits which cell.

A run takes one moment and all five manners where that is sound, one after the other, with everybody back
between two faults. What can happen only once in a run (its first group, its last step) takes a run for
each manner. Two losses at once, and losses down to one worker, are runs of their own at every moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

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


def at_once() -> Iterator[Run]:
    """Several workers are lost in one instant: two, then as many as leave one."""
    for moment in Moment:
        if moment in (Moment.START_UP, Moment.FIRST_GROUP):
            # There is no plan yet that would name others: each comes to the moment by itself.
            for losses in (2, MEMBERS - 1):
                faults = [
                    Fault(name=manner, moment=moment, manner=manner, target=Target(worker=worker))
                    for worker, manner in enumerate(DEATHS[:losses], 1)
                ]
                yield Run(f"{moment.name}-{losses}-at-once", Scenario(faults=tuple(faults), whole=True), 4)
        elif moment in ONCE:
            for losses in (2, MEMBERS - 1):
                yield _corner(f"{moment.name}-{losses}-at-once", moment, also=losses - 1)
        else:
            yield _growing(moment)


def _growing(moment: Moment) -> Run:
    faults: list[Fault] = []
    step = 2
    for losses in (2,) if moment in (Moment.DONOR, Moment.RECOVERY) else (2, MEMBERS - 1):
        also = losses - 1
        after = ""
        if moment in AFTER_A_LOSS:
            before = _loss(f"before {losses}", step, rank=1, also=also if moment is Moment.JOINER else 0)
            faults.append(before)
            after = before.name
        target = Target() if after else Target(since=step)
        faults.append(
            Fault(name=f"{losses}", moment=moment, manner=Manner.KILL, target=target, after=after, also=also)
        )
        step += 5
    options = ("--checkpoint-every", "4") if moment is Moment.CHECKPOINT else ()
    steps = step + (6 if options else 0)
    scenario = Scenario(faults=tuple(faults), whole=True)
    return Run(f"{moment.name}-at-once", scenario, steps, options, compute_ms=_compute_ms(moment))


def tight_corners() -> Iterator[Run]:
    """Where two special moments meet, and further places within one."""
    last = Target(since=CORNER_STEPS - 1)
    for moment in (Moment.BETWEEN, Moment.CHECKPOINT):
        yield _corner(f"{moment.name}-on-the-last-step", moment, target=last)
    for moment in (Moment.GATHER, Moment.LEAVING, Moment.OPTIMIZER):
        yield _corner(f"{moment.name}-two-on-the-last-step", moment, target=last, also=1)
    yield _corner("AFTER_LAST-waiting-to-be-released", Moment.AFTER_LAST, nth=2)
    tail = Target(since=CORNER_STEPS)
    for manner in (Manner.KILL, Manner.RAISE):
        yield _corner(f"AFTER_LAST-in-the-tail-{manner}", Moment.AFTER_LAST, manner=manner, target=tail)
    yield _further_places()


def with_late_threads() -> Iterator[Run]:
    """Every run in which workers are lost while others are at work, with threads that are late."""
    spread = [
        _spread(moment) for moment in Moment if moment not in (*ONCE, Moment.START_UP, Moment.CHECKPOINT)
    ]
    for run in [*spread, *at_once(), *tight_corners()]:
        scenario = msgspec.structs.replace(run.scenario, jitter=JITTER)
        yield dataclasses.replace(run, name=f"{run.name}-late", scenario=scenario)


JITTER = 0.05
CORNER_STEPS = 4


def _corner(name: str, moment: Moment, **fields: Any) -> Run:
    fault = Fault(**{"name": "corner", "moment": moment, "manner": Manner.KILL, **fields})
    return Run(name, Scenario(faults=(fault,)), CORNER_STEPS)


def _further_places() -> Run:
    """One after the other: before the last finished piece goes out, later in a recovery, late in healing."""
    faults: list[Fault] = []
    step = 1
    for also in range(3):
        target = Target(since=step)
        name = f"the last piece, {also} more"
        faults.append(
            Fault(name=name, moment=Moment.GATHER, manner=Manner.KILL, target=target, nth=2, also=also)
        )
        step += 4
    for moment, nth in ((Moment.RECOVERY, 2), (Moment.RECOVERY, 3), (Moment.DONOR, 5), (Moment.JOINER, 20)):
        name = f"{moment}, {nth}"
        before = _loss(f"before {name}", step, rank=0)
        faults += [before, Fault(name=name, moment=moment, manner=Manner.KILL, nth=nth, after=before.name)]
        step += 5
    return Run("further-places", Scenario(faults=tuple(faults), whole=True), step + 1)

"""Folds the records of a run into a report. Pure: the same records give the same report.

1. Faults: each `fault_detected` is one; a later notice of a worker that has already ended belongs to
   the first. It began with the worker's `worker_ending`, if there is one, and the others' answer may come
   before it is known how the worker ended. `fault_decided` gives severity and action; the first
   `generation_opened` after the beginning that names the worker as lost gives the micro-batches dealt again;
   the first unclaimed `healed` after it (the worker's own, else on its node, else any) gives where its
   replacement's state came from.
2. Steps: a step's time is the difference of two neighbouring commits within one start of the run.
3. Stalls: (first commit after the fault of a step beyond − last commit before it) − the median step. Before
   the first commit of a start counts the moment at which its first generation computed. Steps that come again
   after a total loss have no line of their own: their commits are the events `step_again`.
4. Goodput: (worker-seconds between commits − the stalls in them) / (worker-seconds that processes existed):
   starting, healing, waiting as a standby, stalls and the time around the loop all count against it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from perdure.report.lives import fold_lives
from perdure.report.model import FINAL_KINDS, Fault, Life, Moment, Report, StepTime
from perdure.report.records import Commit, Event, Records

NOTED = {
    "run_started": "started",
    "checkpoint_refused": "checkpoint refused",
    "refused": "refused",
    "given_up": "given up",
    "run_ended": "ended",
}
"""Events that a reader should see word for word, and what the page calls them."""

_REPLACING = ("replace", "isolate", "leave")
"""Actions after which another worker takes the lost one's place."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A fault, when it happened (Unix seconds) and in which step."""

    fault: Fault
    time: float
    step: int | None


def fold(records: Records) -> Report:
    """The report of one run directory's records."""
    events, commits = records.events, records.commits
    origins = _origins(events)
    steps = _step_times(commits, [start for start, _ in origins])
    known = [step.seconds for step in steps if step.seconds is not None]
    step_s = median(known) if known else None
    exit_code = _exit_code(events)
    marks = _marks(events, commits)
    times = [time for time, _ in marks]
    timed = [_with_stall(t, marks, origins, step_s, exit_code) for t in _faults(events)]
    lives = fold_lives(events, times)
    moments = [e.wall_s for e in events] + times
    return Report(
        committed_steps=len(commits),
        final_digest=commits[-1].digest if commits else None,
        step_s_median=step_s,
        goodput=_goodput(steps, timed, lives, origins, step_s),
        faults=tuple(t.fault for t in timed),
        fault_times=tuple(Moment(t.time, t.step, t.fault.kind, t.fault.message) for t in timed),
        steps=steps,
        lives=lives,
        notes=tuple(_note(e) for e in events if e.name in NOTED),
        start=min(moments, default=None),
        end=max(moments, default=None),
        exit_code=exit_code,
        checkpoints=sum(e.name == "checkpoint_written" for e in events),
        launchers_lost=_launchers_lost(events),
        steps_again=sum(e.name == "step_again" for e in events),
        unread=records.unread,
    )


def _launchers_lost(events: Sequence[Event]) -> int:
    """How many runs another one followed although they had not ended."""
    names = [event.name for event in events if event.name in ("run_started", "run_ended")]
    return sum(pair == ("run_started", "run_started") for pair in pairwise(names))


def _origins(events: Sequence[Event]) -> list[tuple[float, float]]:
    """For each start of the run: its time, and when its first generation computed (else the start itself)."""
    origins: list[tuple[float, float]] = []
    waiting = False
    for event in events:
        if event.name == "run_started":
            origins.append((event.wall_s, event.wall_s))
            waiting = True
        elif event.name == "generation_computing" and (waiting or not origins):
            start = origins.pop()[0] if origins else event.wall_s
            origins.append((start, event.wall_s))
            waiting = False
    return origins


def _marks(events: Sequence[Event], commits: Sequence[Commit]) -> list[tuple[float, int]]:
    """When which step was committed, for the first time or again."""
    again = [
        (time, event.step)
        for event in events
        if event.name == "step_again"
        and event.step is not None
        and (time := event.number("time")) is not None
    ]
    return sorted([(commit.time, commit.step) for commit in commits] + again)


def _exit_code(events: Sequence[Event]) -> int | None:
    """The exit code of the newest start; None while it runs or when its launcher was killed."""
    for event in reversed(events):
        if event.name == "run_started":
            return None
        if event.name == "run_ended":
            code = event.number("exit_code")
            return None if code is None else int(code)
    return None


def _step_times(commits: Sequence[Commit], starts: Sequence[float]) -> tuple[StepTime, ...]:
    steps: list[StepTime] = []
    before: Commit | None = None
    for commit in commits:
        neighbour = (
            before is not None
            and before.step == commit.step - 1
            and bisect_right(starts, before.time) == bisect_right(starts, commit.time)
        )
        seconds = commit.time - before.time if before is not None and neighbour else None
        steps.append(StepTime(commit.step, commit.time, seconds, commit.workers, commit.loss))
        before = commit
    return tuple(steps)


def _faults(events: Sequence[Event]) -> list[_Timed]:
    """All faults in the order in which they were known, without their stalls."""
    onsets: dict[int, int] = {}
    ending: dict[int, int] = {}
    ended: set[int] = set()
    for index, event in enumerate(events):
        if event.name == "run_started":
            ended.clear()
            ending.clear()
        elif event.name == "worker_ending" and event.worker is not None:
            ending[event.worker] = index
        elif event.name == "fault_detected" and event.worker not in ended:
            onsets[index] = index
            if event.worker is not None and event.text("kind") in FINAL_KINDS:
                ended.add(event.worker)
                onsets[index] = ending.get(event.worker, index)
    heads = list(onsets)
    decided = _claims(events, heads, "fault_decided")
    dealt = _dealt(events, onsets)
    healed = _healed(events, heads, decided)
    return [
        _fault(events[i], events[onsets[i]], decided.get(i), dealt.get(i, 0), healed.get(i)) for i in heads
    ]


def _fault(event: Event, onset: Event, decided: Event | None, dealt: int, healed: Event | None) -> _Timed:
    detect_s = event.number("detect_s")
    if onset is not event and (noticed := onset.number("noticed_s")) is not None:
        detect_s = max(0.0, onset.wall_s - noticed)  # of another host's clock, perhaps
    fault = Fault(
        kind=event.text("kind"),
        worker=event.worker,
        node=event.node,
        detected_by=event.text("detected_by"),
        severity=decided.text("severity") if decided else "",
        action=decided.text("action") if decided else "",
        detect_s=detect_s,
        stall_s=None,
        recomputed_micro_batches=dealt,
        state_source=(healed.text("source") if healed else "") or "none",
        healed_bytes=int((healed.number("bytes") if healed else None) or 0),
        message=event.text("message"),
    )
    return _Timed(
        fault, onset.wall_s - (detect_s or 0.0), onset.step if onset.step is not None else event.step
    )


def _later(events: Sequence[Event], onsets: Mapping[int, int], name: str) -> dict[int, list[int]]:
    """For each fault the indices of the events `name` after its beginning."""
    named = [index for index, event in enumerate(events) if event.name == name]
    return {head: named[bisect_right(named, onset) :] for head, onset in onsets.items()}


def _claims(events: Sequence[Event], heads: Sequence[int], name: str) -> dict[int, Event]:
    """For each fault the first event `name` of the same worker (and node) after it, each used once."""
    found: dict[int, Event] = {}
    used: set[int] = set()
    for head, later in _later(events, {head: head for head in heads}, name).items():
        for index in later:
            event = events[index]
            same = event.worker == events[head].worker and event.node in ("", events[head].node)
            if same and index not in used:
                used.add(index)
                found[head] = event
                break
    return found


def _dealt(events: Sequence[Event], onsets: Mapping[int, int]) -> dict[int, int]:
    """Micro-batches dealt again, for each fault; several that one generation answered share them evenly."""
    answered: dict[int, list[int]] = {}
    for head, later in _later(events, onsets, "generation_opened").items():
        worker = events[head].worker
        for index in later:
            lost = events[index].workers("lost")
            if lost and (worker is None or worker in lost):
                answered.setdefault(index, []).append(head)
                break
    shares: dict[int, int] = {}
    for index, together in answered.items():
        total = int(events[index].number("dealt") or 0)
        for place, head in enumerate(together):
            shares[head] = total // len(together) + (place < total % len(together))
    return shares


def _healed(events: Sequence[Event], heads: Sequence[int], decided: dict[int, Event]) -> dict[int, Event]:
    """For each fault that was answered by a replacement (or by healing the worker itself), its `healed`."""
    found: dict[int, Event] = {}
    used: set[int] = set()
    for head, all_later in _later(events, {head: head for head in heads}, "healed").items():
        fault = events[head]
        later = [i for i in all_later if i not in used]
        chosen = [i for i in later if events[i].worker == fault.worker]
        if head in decided and decided[head].text("action") in _REPLACING:
            chosen = chosen or [i for i in later if events[i].node == fault.node] or later
        if chosen:
            found[head] = events[chosen[0]]
            used.add(chosen[0])
    return found


def _with_stall(
    timed: _Timed,
    marks: Sequence[tuple[float, int]],
    origins: Sequence[tuple[float, float]],
    step_s: float | None,
    exit_code: int | None,
) -> _Timed:
    later = bisect_right(marks, timed.time, key=lambda mark: mark[0])
    before, done = marks[later - 1] if later else (None, -1)
    starts = [start for start, _ in origins]
    run = bisect_right(starts, timed.time) - 1
    if run >= 0 and (before is None or before < starts[run]):
        before, done = min(origins[run][1], timed.time), -1
    after = next((time for time, step in marks[later:] if step > done), None)
    if after is None:
        return replace(timed, fault=replace(timed.fault, stall_s=0.0 if exit_code == 0 else None))
    if before is None or step_s is None:
        return timed
    return replace(timed, fault=replace(timed.fault, stall_s=after - before - step_s))


def _goodput(
    steps: Sequence[StepTime],
    faults: Sequence[_Timed],
    lives: Sequence[Life],
    origins: Sequence[tuple[float, float]],
    step_s: float | None,
) -> float | None:
    existed = sum(life.seconds for life in lives)
    if existed <= 0 or step_s is None:
        return None
    times = [step.time for step in steps]
    disturbed = {bisect_right(times, t.time) for t in faults}
    useful = 0.0
    for index, step in enumerate(steps):
        seconds = step.seconds
        if seconds is None:  # the first step of a start, from the moment at which its generation computed
            begun = [begin for _, begin in origins if begin <= step.time]
            seconds = min(step.time - begun[-1], step_s) if begun else 0.0
        useful += step.workers * (min(seconds, step_s) if index in disturbed else seconds)
    return min(1.0, useful / existed)


def _note(event: Event) -> Moment:
    said = [f"{key} {value}" for key, value in event.extra.items() if value not in (None, "", [], {})]
    return Moment(event.wall_s, event.step, NOTED[event.name], ", ".join(said))

"""Whether a job stood its faults: judged from what it left behind, knowing nothing of how they were made.

`judge` is for a run whose undisturbed result is known: it checks the guarantees of docs/guarantees.md by
their words. `endured` is for anybody's run, of which only its own files tell.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

_SHOWN_MAX = 5


class Outcome(enum.StrEnum):
    """UNKNOWN: nothing speaks against the job, but not every fault struck."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Verdict(msgspec.Struct, frozen=True):
    """The outcome, and one line for everything that is wrong or missing."""

    outcome: Outcome
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([self.outcome.value, *self.findings])


class Commit(NamedTuple):
    """A process's own digest of its state after committing a step."""

    pid: int
    step: int
    digest: str


class Start(NamedTuple):
    """A process began to compute a micro-batch, at `time_ns` of any clock that all of them share."""

    time_ns: int
    pid: int
    step: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left: its exit code, its files, its processes' own notes.

    `steps` are those of metrics.jsonl in its order; `samples` are (step, micro-batch, sample ids) of
    samples.jsonl; `fired` names the faults that struck, `struck` are the processes that were hit; `leavers`
    are those of them that were asked to leave; `refused` are steps of which leaves were void (P7, E3).
    """

    exit_code: int
    steps: Sequence[int]
    samples: Sequence[tuple[int, int, tuple[int, ...]]]
    commits: Sequence[Commit]
    starts: Sequence[Start]
    fired: frozenset[str] = frozenset()
    struck: frozenset[int] = frozenset()
    leavers: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The undisturbed run: the digest after every step and the samples of every micro-batch."""

    digests: Sequence[str]
    per_step: int
    ids: Callable[[int, int], Sequence[int]]
    exit_code: int = 0
    faults: frozenset[str] = field(default_factory=frozenset)


def judge(evidence: Evidence, expected: Expected) -> Verdict:
    """The verdict on a run whose undisturbed result is known."""
    wrong: list[str] = []
    if evidence.exit_code != expected.exit_code:
        wrong.append(f"the exit code is {evidence.exit_code}, not {expected.exit_code}")
    for check in (_digests, _metrics, _samples, _nothing_twice, _nobody_else_lost):
        found = list(check(evidence, expected))
        wrong += found[:_SHOWN_MAX]
        if len(found) > _SHOWN_MAX:
            wrong.append(f"… and {len(found) - _SHOWN_MAX} more like it")
    if wrong:
        return Verdict(Outcome.FAIL, tuple(wrong))
    missing = sorted(expected.faults - evidence.fired)
    if missing:
        return Verdict(Outcome.UNKNOWN, tuple(f"fault {name!r} never struck" for name in missing))
    return Verdict(Outcome.PASS)


def _digests(evidence: Evidence, expected: Expected) -> Iterator[str]:
    """G1: every state that any process committed is that of the undisturbed run."""
    seen = set()
    for pid, step, digest in evidence.commits:
        seen.add(step)
        if not 0 <= step < len(expected.digests):
            yield f"process {pid} committed step {step} of {len(expected.digests)}"
        elif digest != expected.digests[step]:
            yield f"after step {step} process {pid} has another state than the undisturbed run"
    for step in sorted(set(range(len(expected.digests))) - seen):
        yield f"nobody noted its state after step {step}"


def _metrics(evidence: Evidence, expected: Expected) -> Iterator[str]:
    """P18: each step has one line, in order."""
    if list(evidence.steps) != list(range(len(expected.digests))):
        twice = sorted(step for step, count in Counter(evidence.steps).items() if count > 1)
        missing = sorted(set(range(len(expected.digests))) - set(evidence.steps))
        yield f"metrics.jsonl: steps {twice} more than once, {missing} missing, or out of order"


def _samples(evidence: Evidence, expected: Expected) -> Iterator[str]:
    """Each micro-batch was summed once, with its own samples."""
    count = len(expected.digests) * expected.per_step
    found = Counter((step, micro_batch) for step, micro_batch, _ in evidence.samples)
    wanted = {divmod(index, expected.per_step) for index in range(count)}
    for step, micro_batch in sorted(wanted ^ set(found)):
        yield f"samples.jsonl: micro-batch {micro_batch} of step {step} is missing, or there is no such"
    for step, micro_batch, ids in evidence.samples:
        if found[step, micro_batch] > 1:
            yield f"samples.jsonl: micro-batch {micro_batch} of step {step} is there more than once"
        elif list(ids) != list(expected.ids(step, micro_batch)):
            yield f"samples.jsonl: micro-batch {micro_batch} of step {step} was of other samples"


def _nothing_twice(evidence: Evidence, expected: Expected) -> Iterator[str]:
    """G2: nobody computes what it has computed, nor what a process that lives to commit the step began.

    Whom the step's commit saw alive is known from its note. What a leaver had in hand does not count, nor
    what was void.
    """
    committed = {(commit.pid, commit.step) for commit in evidence.commits}
    by_work: dict[tuple[int, int], list[Start]] = defaultdict(list)
    for start in sorted(start for start in evidence.starts if start.step not in evidence.refused):
        by_work[start.step, start.micro_batch].append(start)
    for (step, micro_batch), starts in sorted(by_work.items()):
        if len({start.pid for start in starts}) < len(starts):
            yield f"one process computed micro-batch {micro_batch} of step {step} twice"
        for earlier, later in itertools.pairwise(starts):
            if (earlier.pid, step) in committed and earlier.pid not in evidence.leavers:
                yield (
                    f"process {later.pid} computed micro-batch {micro_batch} of step {step} after process "
                    f"{earlier.pid}, which lived on"
                )


def _nobody_else_lost(evidence: Evidence, expected: Expected) -> Iterator[str]:
    """A process that trained and that nothing struck is there at the end: no recovery gives one up."""
    last = len(expected.digests) - 1
    at_end = {commit.pid for commit in evidence.commits if commit.step == last}
    for pid in sorted({start.pid for start in evidence.starts} - at_end - evidence.struck):
        yield f"process {pid} was lost, though nothing struck it"


def endured(wanted: int, struck: int, before: int, after: int, exit_code: int | None) -> Verdict:
    """The verdict on a run of which only its files tell.

    Args:
        wanted: faults that were to strike.
        struck: those that did.
        before: the last step in metrics.jsonl when the last one struck, −1 for none.
        after: the last step there now.
        exit_code: how the run ended; None while it goes on.
    """
    if exit_code not in (None, 0):
        return Verdict(Outcome.FAIL, (f"the run ended with exit code {exit_code}",))
    if exit_code is None and after <= before:
        return Verdict(Outcome.FAIL, (f"no step was committed after step {before}",))
    if struck < wanted:
        return Verdict(Outcome.UNKNOWN, (f"the run ended after {struck} of {wanted} faults",))
    return Verdict(Outcome.PASS)

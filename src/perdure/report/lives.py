"""What each worker did when: its life as spans, folded from the events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.report.model import FINAL_KINDS, Life, Span
from perdure.report.records import Event

STARTING, HEALING, ACTIVE = "starting", "healing", "active"


@dataclass(slots=True)
class _Open:
    """A life that has not ended yet."""

    worker: int
    node: str
    state: str
    since: float
    spans: list[Span] = field(default_factory=list)

    def enter(self, state: str, now: float) -> None:
        if state == self.state:
            return
        if now > self.since:
            self.spans.append(Span(self.state, self.since, now))
        self.state, self.since = state, max(now, self.since)

    def close(self, now: float, ended: str) -> Life:
        self.enter("", now)
        return Life(self.worker, self.node, tuple(self.spans), ended)


def fold_lives(events: Sequence[Event], commit_times: Sequence[float]) -> tuple[Life, ...]:
    """Lives in the order of their start.

    A life that nothing ended (the launcher was killed) ends with the last sign of its run: an event or
    a commit, whose times are `commit_times` in Unix seconds.
    """
    lives: list[Life] = []
    open_: dict[int, _Open] = {}
    last = 0.0
    for event in events:
        if event.name == "run_started":
            sign = max([t for t in commit_times if t < event.wall_s], default=last)
            lives += [life.close(max(last, sign), "") for life in open_.values()]
            open_.clear()
        last = event.wall_s
        if event.name == "run_ended":
            lives += [life.close(last, "") for life in open_.values()]
            open_.clear()
        else:
            lives += _one(event, open_)
    sign = max([last, *commit_times])
    lives += [life.close(sign, "") for life in open_.values()]
    return tuple(sorted(lives, key=lambda life: (life.spans[0].start if life.spans else 0.0, life.worker)))


def _one(event: Event, open_: dict[int, _Open]) -> list[Life]:
    """Applies one event to the open lives and returns those that it ended."""
    now, worker = event.wall_s, event.worker
    if event.name == "generation_computing":
        for member in event.workers("members"):
            life = open_.setdefault(member, _Open(member, event.node, ACTIVE, now))
            if life.state == STARTING:
                life.enter(ACTIVE, now)
        return []
    if worker is None:
        return []
    if event.name == "worker_started":
        open_.setdefault(worker, _Open(worker, event.node, STARTING, now))
    elif worker in open_:
        if event.name == "heal_started":
            open_[worker].enter(HEALING, now)
        elif event.name in ("healed", "joined"):
            open_[worker].enter(ACTIVE, now)
        elif event.name == "left":
            return [open_.pop(worker).close(now, "left")]
        elif event.name == "fault_detected" and event.text("kind") in FINAL_KINDS:
            return [open_.pop(worker).close(now, event.text("kind"))]
    return []

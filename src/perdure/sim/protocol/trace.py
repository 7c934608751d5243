"""What happened in a run, as lines that a person can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from perdure.schema import messages as msg
from perdure.schema.plan import Address, Header, Hold, Leaf, Ledger, Plan, Position, Run, Source, Switched


class Trace:
    """Collects lines: time, who, what."""

    def __init__(
        self, quiet: frozenset[str] = frozenset(), quiet_events: frozenset[str] = frozenset()
    ) -> None:
        """
        Args:
            quiet: types of messages that are left out.
            quiet_events: names of the coordinator's events that are left out.
        """
        self.lines: list[str] = []
        self._quiet = quiet
        self._quiet_events = quiet_events
        self._last: tuple[float, str, str] | None = None

    def add(self, now: float, who: str, what: str, detail: Any = None) -> None:
        """One line."""
        if type(detail).__name__ not in self._quiet and what not in self._quiet_events:
            text = "" if detail is None else f" {words(detail)}"
            if (now, who, text) == self._last and what.startswith("to "):
                before, _, _ = self.lines.pop().rpartition(text)
                self.lines.append(f"{before}{what[2:]}{text}")  # one message to several
            else:
                self.lines.append(f"{now:8.3f} {who:<11} {what}{text}")
            self._last = (now, who, text) if what.startswith("to ") else None

    def __str__(self) -> str:
        return "\n".join(self.lines)


def words(thing: Any) -> str:
    """A message, in few words."""
    match thing:
        case msg.Seal(generation, members):
            return f"Seal {generation} among {_ids(members)}"
        case msg.Open(plan) | msg.Prepare(plan):
            return f"{type(thing).__name__} {_plan(plan)}"
        case msg.Report(generation, position):
            return f"Report {generation}: {_position(position)}"
        case msg.Ready(position=position):
            return f"Ready: {_position(position)}"
        case msg.Published(record):
            return f"Published step {record.step} digest {record.digest}"
        case msg.Finished(step, digest, _):
            return f"Finished step {step} digest {digest}"
        case Header(generation, step, _, digest, entries, ready, fine):
            known = f"ready {ready}" if ready.number else ""
            covered = ",".join(str(entry.micro_batch) for entry in entries)
            fit = "" if fine else "not fine"
            return " ".join(
                f"Header {generation} step {step} state {digest} of {covered} {known} {fit}".split()
            )
        case Hold(generation, step, _) | Ledger(generation, step, _):
            return f"{type(thing).__name__} {generation} step {step}"
        case Switched(generation, base, _):
            return f"Switched {generation} after step {base}"
        case dict():
            return " ".join(f"{key}={value}" for key, value in thing.items() if value not in (None, "", ()))
        case msgspec.Struct():
            fields = [f"{name} {getattr(thing, name)}" for name in thing.__struct_fields__]
            return f"{type(thing).__name__} {', '.join(fields)}"
    return str(thing)


def _ids(members: Iterable[Address]) -> str:
    return " ".join(f"w{member.worker}" for member in members)


def _position(position: Position) -> str:
    words = [f"{'committing' if position.committing else 'committed'} {position.committed}"]
    if position.held:
        words.append("holds " + " ".join(_run(run) for run in position.held))
    if position.in_hand is not None:
        words.append(f"in hand {position.in_hand}")
    if position.queue:
        words.append("queue " + " ".join(map(str, position.queue)))
    flags = ("whole", "ledger_complete", "healing", "left", "done")
    words += [flag.replace("_", " ") for flag in flags if getattr(position, flag)]
    if position.reduced:
        words.append("reduced " + " ".join(f"{s.bucket}:{s.lo}-{s.hi}" for s in position.reduced))
    return ", ".join(words)


def _run(run: Run | Leaf) -> str:
    return str(run.first) if run.count == 1 else f"{run.first}–{run.stop - 1}"


def _plan(plan: Plan) -> str:
    words = [f"{plan.generation} of {_ids(plan.members)}"]
    words.append(f"following {plan.follows}" if plan.base == -2 else f"after step {plan.base}")
    if plan.joiners:
        words.append(f"joiners {' '.join(f'w{w}' for w in plan.joiners)} from {_ids(plan.donors)}")
    for worker, share in plan.shares.items():
        words.append(f"w{worker} computes {' '.join(map(str, share))}")
    if plan.leaves:
        words.append("sum of " + " ".join(f"{_run(leaf)}@w{leaf.worker}" for leaf in plan.leaves))
    if plan.gather:
        words.append("gather " + " ".join(_source(source) for source in plan.gather))
    if plan.resting:
        words.append("resting " + " ".join(f"w{w}" for w in plan.resting))
    if plan.void:
        words.append("void " + " ".join(f"w{w}" for w in plan.void))
    if plan.stop:
        words.append("stop")
    return "; ".join(words)


def _source(source: Source) -> str:
    return f"{source.span.bucket}:{source.span.lo}-{source.span.hi}@w{source.worker}"

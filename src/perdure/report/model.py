"""What a report says. `Report.as_json` is the stable content of `report.json`; the rest is for the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FINAL_KINDS = frozenset({"exit", "signal", "exception", "hang", "node"})
"""Kinds of fault that end the worker: whatever is noticed of it afterwards is the same fault. (A leaver
works on until it has handed over, and can still be killed before.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and what it cost, with the field names of `report.json`.

    `detect_s` runs from the fault to the moment it was known. `stall_s` is (first commit after the fault −
    last commit before it) − the median step: None when no later step was committed although the run did not
    end well, 0 when all steps were committed already. `state_source` is where its replacement's state came
    from. Faults that one generation answered share its micro-batches, so that the sum over faults is right.
    """

    kind: str
    worker: int | None
    node: str
    detected_by: str
    severity: str
    action: str
    detect_s: float | None
    stall_s: float | None
    recomputed_micro_batches: int
    state_source: str
    healed_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class Moment:
    """When and in which step something happened; `time` is in Unix seconds."""

    time: float
    step: int | None
    label: str
    detail: str


@dataclass(frozen=True, slots=True)
class Span:
    """A worker was in `state` (`starting healing active`) from `start` to `end`, in Unix seconds."""

    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Life:
    """One worker's life. `ended` says how: the kind of its fault, `left`, or empty (the run's end)."""

    worker: int
    node: str
    spans: tuple[Span, ...]
    ended: str

    @property
    def seconds(self) -> float:
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A committed step: its commit (Unix seconds), and the seconds since the one before (None: unknown)."""

    step: int
    time: float
    seconds: float | None
    workers: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `fault_times` has the moment of each fault; `notes` what else a reader should know,
    `launchers_lost` how many launchers ended without a word and were started again (what that cost is in no
    fault), `steps_again` how many steps had been committed before a total loss and came again.
    """

    committed_steps: int
    final_digest: str | None
    step_s_median: float | None
    goodput: float | None
    faults: tuple[Fault, ...]
    fault_times: tuple[Moment, ...] = ()
    steps: tuple[StepTime, ...] = ()
    lives: tuple[Life, ...] = ()
    notes: tuple[Moment, ...] = ()
    job: str = ""
    start: float | None = None
    end: float | None = None
    exit_code: int | None = None
    checkpoints: int = 0
    launchers_lost: int = 0
    steps_again: int = 0
    unread: int = 0

    def as_json(self) -> dict[str, Any]:
        """Exactly the fields of `report.json`; None becomes null."""
        return {
            "committed_steps": self.committed_steps,
            "final_digest": self.final_digest,
            "step_s_median": self.step_s_median,
            "goodput": self.goodput,
            "faults": [asdict(fault) for fault in self.faults],
        }

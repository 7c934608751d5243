"""What the coordinator's state machine wants done: the server (or the simulator) carries it out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perdure.schema import messages as msg
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record

SIGTERM, SIGKILL = 15, 9


@dataclass(frozen=True)
class Send:
    """A message for a worker."""

    worker: WorkerId
    message: msg.CoordinatorMessage


@dataclass(frozen=True)
class Start:
    """Start a worker process; ranks are torchrun's."""

    node: str
    worker: WorkerId
    local_rank: int
    rank: int
    world: int
    attempt: int


@dataclass(frozen=True)
class Kill:
    """Send a signal to a worker."""

    worker: WorkerId
    signum: int = SIGKILL


@dataclass(frozen=True)
class TurnAway:
    """There is no place for this node: end its agent with an exit code, and say why."""

    node: str
    message: str
    exit_code: int = 4


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class WriteRecord:
    """A line of metrics.jsonl."""

    record: Record


@dataclass(frozen=True)
class PublishCheckpoint:
    """Rename a checkpoint into place and prune."""

    written: msg.CheckpointWritten


@dataclass(frozen=True)
class Discard:
    """Remove what was written aside."""

    partial: str


@dataclass(frozen=True)
class PublishSave:
    """Rename what `job.save` wrote aside to the path that the script named; answer with `saved`."""

    worker: WorkerId
    request: msg.SaveRequest


@dataclass(frozen=True)
class Persist:
    """Keep the number of blocks with the job: it never changes again."""

    blocks: int


@dataclass(frozen=True)
class GiveUp:
    """Keep with the job that these workers, out of reach, are none of it any more (G4)."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Say:
    """A line for the people at the terminals."""

    text: str


@dataclass(frozen=True)
class End:
    """The run is over."""

    exit_code: int
    message: str = ""


Action = (
    Send | Start | Kill | TurnAway | Event | WriteRecord | PublishCheckpoint | Discard | PublishSave | Persist
    | GiveUp
    | Say | End
)  # fmt: skip

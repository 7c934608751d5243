"""Every message of the control plane. One wire, one union a direction, decoded strictly.

    worker ── Unix socket ── agent ── TCP ── coordinator

The agent relays between a worker and the coordinator (`FromWorker`, `ToWorker`) without looking inside.
"""

from __future__ import annotations

import msgspec

from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address, Plan, Position, Record, Shape

Scalar = float | int | str | bool | None


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every control message; the type's name is its tag on the wire."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """One worker's row of `perdure ps`, from its shared progress page."""

    worker: WorkerId
    pid: int
    phase: str
    step: int
    micro_batch: int
    samples: int


# ── worker → coordinator ────────────────────────────────────────────────────────────────────────────


class Joined(Message, frozen=True):
    """`perdure.join` was called: from here on the protocol, not the launcher, answers a failure.

    `lifeline`: it holds the lock by which its agent sees early that it ends.
    """

    lifeline: bool = False


class Ready(Message, frozen=True):
    """The script reached its first step: what it trains, where peers reach it, what it has.

    `warning` is a line for the person at the terminal, if the script's bits may not come again (E12).
    """

    host: str
    port: int
    shape: Shape
    position: Position
    warning: str = ""


class Report(Message, frozen=True):
    """The answer to `Seal`: every generation below `generation` is sealed, this is my position."""

    generation: Generation
    position: Position


class Adopted(Message, frozen=True):
    """This worker works in `generation`, on the step after `base`."""

    generation: Generation
    base: int


class Computed(Message, frozen=True):
    """The first micro-batch that this worker started in the generation."""

    generation: Generation
    step: int
    micro_batch: int


class Published(Message, frozen=True):
    """A step's record: every member is known to have committed it (P18)."""

    record: Record


class Trouble(Message, frozen=True):
    """A connection of this generation failed; the peer may be dead or the network may be."""

    generation: Generation
    peer: WorkerId
    reason: str


class Refusal(Message, frozen=True):
    """The headers of a step did not agree or were not fine (P7, P8): nobody commits it here."""

    generation: Generation
    step: int
    digests: dict[WorkerId, str]
    unfit: tuple[WorkerId, ...]


class Healed(Message, frozen=True):
    """A joiner's state at `step` is complete and verified.

    It took `nbytes` in `seconds`, what it took for generations that were superseded included.
    """

    generation: Generation
    step: int
    nbytes: int
    seconds: float
    source: str


class HealStarted(Message, frozen=True):
    """A joiner starts to take `nbytes` of state from `donors`."""

    generation: Generation
    step: int
    nbytes: int
    donors: tuple[WorkerId, ...]


class HealFailed(Message, frozen=True):
    """A joiner could not complete its state."""

    generation: Generation
    reason: str


class Leaving(Message, frozen=True):
    """This worker was asked to go (SIGTERM): hand over at a boundary."""


class Finished(Message, frozen=True):
    """The loop ended here after committing `step`; donors stay until released (P17).

    `by_itself`: the script left it, by `break`, before its last step.
    """

    step: int
    digest: str
    record: Record | None
    by_itself: bool = False


class Restored(Message, frozen=True):
    """The answer to `Restore`: `step` −1 when no checkpoint could be used.

    `differs` says what decides bits and was another when the checkpoint was written.
    """

    step: int
    digest: str
    path: str
    refused: tuple[tuple[str, str], ...] = ()
    differs: str = ""


class CheckpointWritten(Message, frozen=True):
    """A checkpoint lies aside at `partial`, flushed; the coordinator publishes it."""

    step: int
    digest: str
    partial: str
    nbytes: int
    seconds: float


class CheckpointFailed(Message, frozen=True):
    """A checkpoint could not be written; training goes on."""

    step: int
    reason: str


class SaveRequest(Message, frozen=True):
    """`job.save(path)`, the task `index` after `step`, wrote aside at `partial`; may it become `path`?"""

    step: int
    index: int
    partial: str
    path: str


class EvaluationAsk(Message, frozen=True):
    """This worker takes part in evaluation `index` after `step`, over `count` micro-batches."""

    step: int
    index: int
    count: int


class EvaluationResult(Message, frozen=True):
    """Values of one evaluated micro-batch, and its weight."""

    step: int
    index: int
    micro_batch: int
    values: dict[str, float]
    weight: float


class Stranger(Message, frozen=True):
    """Somebody at `peer` who does not know the secret connected to this worker's port, and was refused."""

    peer: str
    reason: str


class Crashed(Message, frozen=True):
    """The script raised (or exited non-zero): said before the process ends.

    `kind` is the exception type's qualified name, `where` the innermost line of the user's own code, as
    file:line; `user` is set for what a restart cannot mend: wrong use of perdure, a syntax error; `doing` is
    what the worker's progress page says; `records` are the lines of steps that it has committed and the
    others have not confirmed: if the error ends the run nobody else tells them.
    """

    kind: str
    where: str
    traceback: str
    exit_code: int
    user: bool = False
    doing: Progress | None = None
    records: tuple[Record, ...] = ()


WorkerMessage = (
    Joined | Ready | Report | Adopted | Computed | Published | Trouble | Refusal | Healed | HealStarted
    | HealFailed | Leaving | Finished | Restored | CheckpointWritten | CheckpointFailed | SaveRequest
    | EvaluationAsk | EvaluationResult | Stranger | Crashed
)  # fmt: skip


# ── coordinator → worker ────────────────────────────────────────────────────────────────────────────


class Welcome(Message, frozen=True):
    """The answer to `Joined`: what is fixed for the whole job."""

    job: str
    blocks: int
    seed: int | None = None
    digest_every: int = 1
    log_samples: bool = False


class Seal(Message, frozen=True):
    """Give up committing in every generation below this one, and report."""

    generation: Generation
    members: tuple[Address, ...]


class Open(Message, frozen=True):
    """The plan of a sealed generation: act on it if it is the highest that you sealed (P11)."""

    plan: Plan


class Prepare(Message, frozen=True):
    """Build the next generation's group in the background; switch where the headers agree (P6)."""

    plan: Plan


class Acknowledged(Message, frozen=True):
    """The records of all steps up to `step` are in metrics.jsonl."""

    step: int


class Restore(Message, frozen=True):
    """Take the first of these checkpoints that is whole; the newest comes first.

    The script has left its loop after step `left_after`, if that is not −1: with that state there is none.
    """

    paths: tuple[str, ...]
    left_after: int = -1


class Checkpoint(Message, frozen=True):
    """Copy the state after the commit of `step` (or the next one) and write it aside below `directory`."""

    step: int
    directory: str


class SaveAnswer(Message, frozen=True):
    """The answer to `SaveRequest`; `reason` is empty when the path is in place."""

    step: int
    index: int
    reason: str = ""


class EvaluationDeal(Message, frozen=True):
    """Evaluate these micro-batches."""

    step: int
    index: int
    micro_batches: tuple[int, ...]


class EvaluationAll(Message, frozen=True):
    """All results of an evaluation, in the order of its micro-batches."""

    step: int
    index: int
    values: tuple[dict[str, float], ...]
    weights: tuple[float, ...]


class Release(Message, frozen=True):
    """The job's end (or this worker's leave) is complete: stop being a donor."""

    exit_code: int = 0


CoordinatorMessage = (
    Welcome | Seal | Open | Prepare | Acknowledged | Restore | Checkpoint | SaveAnswer | EvaluationDeal
    | EvaluationAll | Release
)  # fmt: skip


# ── agent ↔ coordinator ─────────────────────────────────────────────────────────────────────────────


class WorkerSeen(Message, frozen=True):
    """A worker that the agent already has, told when it connects again."""

    worker: WorkerId
    pid: int
    joined: bool
    ready: Ready | None


class AgentHello(Message, frozen=True):
    """First frame of an agent: its node, how many workers it is to hold, and those that it has.

    `key` is what the coordinator before named the job by, '' if there was none. `asked` is the signal by
    which the person at its terminal wants the job to end, or 0: a coordinator before this one may have been
    told.
    """

    node: str
    host: str
    workers: int
    standby: int
    script: tuple[str, ...]
    version: str
    seen: tuple[WorkerSeen, ...] = ()
    key: str = ""
    asked: int = 0


class WorkerStarted(Message, frozen=True):
    """A worker process exists."""

    worker: WorkerId
    pid: int


class WorkerEnding(Message, frozen=True):
    """A worker process has begun to end: nothing more comes of it. How it ended is told later.

    `wall_s` is when its agent knew, `doing` what its progress page says.
    """

    worker: WorkerId
    wall_s: float
    doing: Progress | None = None


class WorkerExited(Message, frozen=True):
    """A worker process ended, its socket drained to the end (P19).

    `exit_code` is None when a signal ended it. `detect_s` runs from the kernel's notice to this frame;
    `tail` are its last lines of stderr, `doing` is what its progress page said at the end.
    """

    worker: WorkerId
    exit_code: int | None
    signal: int | None
    detect_s: float
    wall_s: float
    tail: str = ""
    doing: Progress | None = None


class FromWorker(Message, frozen=True):
    """A worker's message, relayed."""

    worker: WorkerId
    body: msgspec.Raw


class Status(Message, frozen=True):
    """What the agent's workers are doing, a few times a second."""

    workers: tuple[Progress, ...]


class Asked(Message, frozen=True):
    """The person at this agent's terminal wants the job to end (SIGINT, SIGTERM)."""

    signum: int


AgentMessage = AgentHello | WorkerStarted | WorkerEnding | WorkerExited | FromWorker | Status | Asked


class AgentWelcome(Message, frozen=True):
    """The coordinator takes the agent in. `key` tells the job from others of its name."""

    job: str
    incarnation: int
    rank: int
    nodes: int
    key: str = ""


class StartWorker(Message, frozen=True):
    """Fork a worker from the zygote; `env` is torchrun's environment for scripts that read it."""

    worker: WorkerId
    env: dict[str, str]


class StopWorker(Message, frozen=True):
    """Send a signal to a worker: SIGKILL for one that a generation excludes."""

    worker: WorkerId
    signum: int


class ToWorker(Message, frozen=True):
    """A message for a worker, relayed."""

    worker: WorkerId
    body: msgspec.Raw


class EndAgent(Message, frozen=True):
    """The job is over: end what is left and exit with this code, showing `message`."""

    exit_code: int
    message: str = ""


class Notice(Message, frozen=True):
    """A line about the job, for the person at the terminal of another node than the coordinator's."""

    text: str


CoordinatorToAgent = AgentWelcome | StartWorker | StopWorker | ToWorker | EndAgent | Notice


# ── agent ↔ zygote ──────────────────────────────────────────────────────────────────────────────────


class ZygoteReady(Message, frozen=True):
    """The zygote has imported torch: forks are quick from now on."""


class Fork(Message, frozen=True):
    """Fork a worker. The frame carries four descriptors: control, progress page, stdout, stderr.

    `script` is a path and its arguments, or `-m`, a module and its arguments; `env` is put on top of the
    zygote's environment; `data_key` opens connections between the job's workers.
    """

    worker: WorkerId
    script: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    node: str
    host: str
    data_key: bytes


class Forked(Message, frozen=True):
    """The worker exists as `pid`, a child of the agent; it waits for one byte on its control socket."""

    worker: WorkerId
    pid: int


class ForkFailed(Message, frozen=True):
    """The system refused a process."""

    worker: WorkerId
    reason: str


ZygoteMessage = ZygoteReady | Forked | ForkFailed


# ── observer ↔ coordinator ──────────────────────────────────────────────────────────────────────────


class PsRequest(Message, frozen=True):
    """`perdure ps`: one row a worker, please."""


class PsRow(msgspec.Struct, frozen=True):
    """One worker, with the field names of `perdure ps --json`."""

    id: int
    node: str
    pid: int | None
    state: str
    generation: str
    step: int
    phase: str
    micro_batch: int


class PsReply(Message, frozen=True):
    """The answer to `PsRequest`."""

    rows: tuple[PsRow, ...]


ServerInput = AgentMessage | PsRequest
ServerOutput = CoordinatorToAgent | PsReply

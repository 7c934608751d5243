"""What workers report of themselves and what the coordinator answers: positions and plans.

Micro-batches are numbered 0 … per_step−1 within a step; block `b` is the contiguous run of
per_step/blocks of them that starts at b·per_step/blocks.
"""

from __future__ import annotations

import msgspec

from perdure.schema.ids import NONE, Generation, WorkerId


class Run(msgspec.Struct, frozen=True, order=True, array_like=True):
    """`count` micro-batches from `first` on, folded in order into one leaf (P5)."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.count


class Leaf(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One term of the canonical sum, and the one worker whose copy of it is used (P4)."""

    first: int
    count: int
    worker: WorkerId

    @property
    def stop(self) -> int:
        return self.first + self.count


class Span(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Elements `lo` … `hi`−1 of bucket `bucket`'s finished gradient."""

    bucket: int
    lo: int
    hi: int


class Source(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A span of the finished gradient and the survivor that holds it."""

    span: Span
    worker: WorkerId


class Address(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A member, the node it runs on, and where its peers reach it."""

    worker: WorkerId
    node: str
    host: str
    port: int


class Shape(msgspec.Struct, frozen=True):
    """What must be the same in every worker of a job: the cut of a step and of the gradient.

    `buckets` are element counts in the order of the parameter list (E11); `until` is the number of
    steps; `signature` is a digest over names, shapes and dtypes of everything protected. With
    `first_block_whole` the micro-batches of block 0 are computed in order by one worker (E8). Without
    `exact` a worker adds up all that it computes in a step in one place: its one term of the sum. An epoch
    has `epoch_steps` steps, the last of which has only `last_in_epoch` micro-batches (0: all are full).
    """

    per_step: int
    blocks: int
    until: int
    buckets: tuple[int, ...]
    signature: str = ""
    state_bytes: int = 0
    first_block_whole: bool = False
    exact: bool = True
    epoch_steps: int = 0
    last_in_epoch: int = 0

    def block(self, micro_batch: int) -> int:
        """The block of a micro-batch."""
        return micro_batch // (self.per_step // self.blocks)

    def run(self, block: int) -> Run:
        """The micro-batches of a block."""
        size = self.per_step // self.blocks
        return Run(block * size, size)

    def present(self, step: int) -> int:
        """How many micro-batches step `step` has: they are 0 … present−1."""
        if self.last_in_epoch and step % self.epoch_steps == self.epoch_steps - 1:
            return self.last_in_epoch
        return self.per_step

    def difference(self, other: Shape) -> str:
        """The first field in which another shape differs, in words."""
        for name in self.__struct_fields__:
            a, b = getattr(self, name), getattr(other, name)
            if a != b:
                was, found = (msgspec.json.encode(value).decode()[:80] for value in (a, b))
                return f"{name} is {found}, not {was}"
        return "nothing"


class Position(msgspec.Struct, frozen=True):
    """What a worker has, reported after it sealed (P3, P4).

    `committed` is the last committed step (−1: none) and counts a commit in progress (`committing`).
    `held`, `in_hand` and `queue` speak of step committed+1; `whole` says that this worker holds that
    step's whole gradient and that all the headers agreed (P2); `reduced` are the finished spans it holds,
    worth something only together with `ledger_complete`: losses and weights of every micro-batch, each
    vouched for by a header that was fine, all of one state (P7, P8).
    """

    worker: WorkerId
    generation: Generation = NONE
    committed: int = -1
    committing: bool = False
    held: tuple[Run, ...] = ()
    in_hand: int | None = None
    queue: tuple[int, ...] = ()
    whole: bool = False
    reduced: tuple[Span, ...] = ()
    ledger_complete: bool = False
    healing: bool = False
    left: bool = False
    done: bool = False
    digest: str = ""


class Plan(msgspec.Struct, frozen=True):
    """One generation: who is in it and how the step after `base` is computed.

    Exactly one plan exists per number, ever (P9). Members are in rank order. Everyone has step `base`
    committed before it computes `base`+1: a member that has not, holds that step's gradient and commits
    it first. `joiners` take the state at `base` from `donors`. `shares` are the micro-batches of step
    `base`+1 that each member still computes, in order; `leaves` cover that step in canonical order. A
    plan with `gather` needs no leaf: the survivors hold every finished span. Later steps follow
    `core.assignment.nominal` from `home` (block → worker, −1 for an orphan).

    A planned switch (`prepare`) has `base` −2: the step at which it starts is agreed in the headers (P6);
    it names the generation that it `follows`, and `stop` ends the job there. `resting` members compute
    nothing in their first step, because taking the state will last a good part of it. Leaves and spans
    of step `base`+1 held by a worker in `void` are thrown away (P8).
    """

    generation: Generation
    members: tuple[Address, ...]
    base: int
    home: tuple[WorkerId, ...]
    shares: dict[WorkerId, tuple[int, ...]] = {}
    leaves: tuple[Leaf, ...] = ()
    gather: tuple[Source, ...] = ()
    joiners: tuple[WorkerId, ...] = ()
    donors: tuple[Address, ...] = ()
    resting: tuple[WorkerId, ...] = ()
    follows: Generation = NONE
    stop: bool = False
    void: tuple[WorkerId, ...] = ()

    @property
    def ranks(self) -> tuple[WorkerId, ...]:
        """Worker ids in rank order."""
        return tuple(member.worker for member in self.members)

    @property
    def step(self) -> int:
        """The step that this plan's shares and leaves speak of."""
        return self.base + 1


SWITCH = -2
"""`Plan.base` of a prepared generation: known only when all switch."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One micro-batch in the ledger of a step: Σ weight·loss, Σ weight, and whether all was finite.

    With sample logging also who computed it, of which samples.
    """

    micro_batch: int
    weighted_loss: float
    weight: float
    finite: bool = True
    worker: WorkerId = -1
    ids: tuple[int, ...] = ()


class Header(msgspec.Struct, frozen=True, tag=True):
    """One immutable header per (generation, step, worker), the same to all (P6).

    `digest` is of the state that the step was computed from (after step−1); `ready` names the prepared
    generation whose group this worker has formed; `fine` is false when the step must not be
    committed (P7).
    """

    generation: Generation
    step: int
    worker: WorkerId
    digest: str
    entries: tuple[Entry, ...]
    ready: Generation = NONE
    fine: bool = True


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Said to every member: I hold the step's whole gradient and all headers agreed (P2)."""

    generation: Generation
    step: int
    worker: WorkerId


class Switched(msgspec.Struct, frozen=True, tag=True):
    """Said to joiners: I work in the generation from the step after `base` on (P6)."""

    generation: Generation
    base: int
    worker: WorkerId


class Ledger(msgspec.Struct, frozen=True, tag=True):
    """Losses and weights of the leaves that a member provides, so that shards can be divided early."""

    generation: Generation
    step: int
    worker: WorkerId
    entries: tuple[Entry, ...]


PeerMessage = Header | Hold | Switched | Ledger


class Record(msgspec.Struct, frozen=True):
    """The line of metrics.jsonl for one committed step; `logged` are the script's own values.

    `samples` are (micro-batch, worker, sample ids) for samples.jsonl.
    """

    step: int
    loss: float
    digest: str
    time: float
    workers: int
    logged: dict[str, float | int | str | bool | None] = {}
    samples: tuple[tuple[int, WorkerId, tuple[int, ...]], ...] = ()

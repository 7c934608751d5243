"""What a recovery policy is: one interface, and the words that policies and their driver share.

A policy looks at one job, at what it runs on now, and at one event, and says what happens next. It is
pure: no clock, no chance, no input or output. Whoever drives it (the simulator in virtual time, a
coordinator in real time) carries the decision out and accounts for the time that it takes.

1. `begin(work, nodes)` lays a job out on its first nodes; None: they are too few.
2. `decide(work, view, event)` answers an event with a `Decision`; None: nothing changes.
3. `saving(work, layout)` says when and how state is saved.

`view` is what the driver knows of the job at that moment. Nodes are numbers of the cluster; the driver keeps
who holds them. A policy whose `deals` is `queue` takes free nodes as they come, first come first served;
where it is `planner` the driver asks `perdure.core.allocation` for the nodes of all jobs at once and the
policy takes and gives exactly what was dealt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

import msgspec
from msgspec import Meta

from perdure.core.policies.work import Workload
from perdure.schema.tables import Table

CAUSES = (
    "useful",
    "healthy_overhead",
    "checkpoint",
    "detection",
    "transition",
    "recomputed",
    "degraded",
    "idle",
    "down",
)
"""Every GPU-second goes to exactly one of these."""


class Method(Enum):
    """How an error shows itself (Unicron, arXiv 2401.00134, table 1 and section 4)."""

    NODE = "node health"
    PROCESS = "process supervision"
    EXCEPTION = "exception propagation"
    STATISTICAL = "online statistical monitoring"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that stops a job's step.

    `severity` is what cures it: 3 a retry in place, 2 a restart of the process, 1 doing without the node.
    `nodes` are lost for good at severity 1, otherwise it is where the error happened. `step_done` is how much
    of the step in progress had been computed, in [0, 1). `graded` is the severity that the error message
    suggests, where it is milder than the truth: the action for it is tried first and fails.
    """

    severity: Literal[1, 2, 3]
    method: Method
    nodes: tuple[int, ...]
    step_done: float
    graded: Literal[1, 2, 3] | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """`nodes` will be taken away after `notice_s` seconds; they still work."""

    nodes: tuple[int, ...]
    notice_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """There are free nodes (`queue`), or the plan of the cluster changed (`planner`): see the view."""


@dataclass(frozen=True, slots=True)
class Slowed:
    """`node` still works but takes `factor` times as long for its part of a step."""

    node: int
    factor: float


Event = Fault | Leaving | Offered | Slowed


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a layout runs and where the time of the GPUs that it uses goes; the three shares sum to 1."""

    step_s: float
    gpus: int
    useful: float
    overhead: float
    degraded: float


def speed(gpus: int, ideal_s: float, healthy_s: float, actual_s: float) -> Speed:
    """The `Speed` of a step of `actual_s` on `gpus` GPUs.

    `ideal_s` is the best step known on as many GPUs, `healthy_s` the policy's own while nothing is broken:
    what it takes beyond the ideal is overhead, what it takes beyond that is degradation.
    """
    ideal_s = min(ideal_s, actual_s)
    healthy_s = min(max(healthy_s, ideal_s), actual_s)
    useful = ideal_s / actual_s
    degraded = (actual_s - healthy_s) / actual_s
    return Speed(actual_s, gpus, useful, max(0.0, 1.0 - useful - degraded), degraded)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a job runs on: how many of its nodes take part, how fast that is, and the policy's own
    `detail`.
    """

    nodes: int
    speed: Speed
    detail: Any = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a transition: `seconds`, and `read_bytes` from the shared storage, as long as that
    takes.
    """

    name: str
    seconds: float = 0.0
    read_bytes: float = 0.0


class Lost(Enum):
    """Which work has to be done again."""

    NOTHING = "nothing"
    SHARE = "a share of the step in progress"
    STEP = "the step in progress"
    MEMORY = "everything since the newest copy in host memory"
    CHECKPOINT = "everything since the newest complete checkpoint"


@dataclass(frozen=True, slots=True)
class Later:
    """After `after_s` seconds the job switches to `layout`, at a boundary, and stalls for `stages`."""

    after_s: float
    layout: Layout
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy does about an event, in the order in which it happens.

    1. `take` nodes of `view.free` join the job and `release` nodes leave it.
    2. The job stalls for `detect_s`, then, with `save_first`, until a checkpoint is written, then for
       `stages`.
    3. It runs on `layout` after rolling back what is `lost` (`share` of the step in progress where it is a
       share). None: it waits for nodes.
    4. `later` is a further change that is made ready meanwhile; nodes that the job holds but does not use get
       ready for it.

    `returning` are nodes that leave the job, start their processes anew and are free after the given seconds.
    """

    layout: Layout | None
    reason: str
    detect_s: float = 0.0
    stages: tuple[Stage, ...] = ()
    lost: Lost = Lost.NOTHING
    share: float = 0.0
    take: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    returning: tuple[tuple[int, float], ...] = ()
    later: Later | None = None
    save_first: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What the driver knows of one job.

    `held` are its nodes, lost ones no longer among them. `nominal` is how many it was given at first. `free`
    are the nodes that it may take (`queue`) or has to take (`planner`); `give` those that the plan takes
    away.
    """

    layout: Layout | None
    held: Collection[int]
    nominal: int
    free: Sequence[int] = ()
    give: tuple[int, ...] = ()
    running_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Saving:
    """When and how state is saved.

    Every `every_s` seconds of running, or every `every_steps` steps, the job stalls for `stall_s`;
    `write_bytes` go to the shared storage, in the background or (`waits`) while the job stalls. The
    checkpoint counts once they are written. `memory_steps` > 0: state is also copied to the memory of
    other hosts every so many steps, at no cost to the step.
    """

    every_s: float | None = None
    every_steps: int | None = None
    stall_s: float = 0.0
    write_bytes: float = 0.0
    waits: bool = False
    memory_steps: int = 0


class Policy(Protocol):
    """The interface of every recovery policy; see the module's docstring for who calls what and when."""

    name: ClassVar[str]
    deals: ClassVar[Literal["queue", "planner"]]

    @property
    def settings(self) -> Table:
        """The assumptions, each with its plausible range."""

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        """The first layout on `nodes`, or None if the job cannot run on them."""

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        """What to do about `event`, or None if nothing changes."""

    def saving(self, work: Workload, layout: Layout) -> Saving:
        """When and how state is saved while the job runs on `layout`."""


@dataclass(frozen=True, slots=True)
class Range:
    """The plausible range of an assumption, and which way the goodput moves when it grows."""

    low: float
    high: float
    more_is: Literal["worse", "better", "either"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """A setting that no source fixes: its value, why it is there, and its plausible range."""

    name: str
    text: str
    value: float
    range: Range


def assumptions_of(settings: type[Table]) -> list[Assumption]:
    """The assumptions among a policy's settings, with their default values."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(settings)}
    found = []
    for name, annotation in get_type_hints(settings, include_extras=True).items():
        for meta in getattr(annotation, "__metadata__", ()):
            known = meta.extra.get("range") if isinstance(meta, Meta) and meta.extra else None
            if known is not None and meta.description is not None:
                found.append(Assumption(name, meta.description, float(defaults[name]), known))
    return found


def assumed(
    text: str,
    low: float,
    high: float,
    more_is: Literal["worse", "better", "either"],
    above: float | None = None,
) -> Meta:
    """Annotation of a settings field: what is assumed, its plausible range, its effect on the goodput.

    A value outside the range is accepted if it is not negative, or `above` the given bound: the range is
    plausible, not all that is possible. Tests move every assumption across it, and the reproduction page does
    so for Unicron's figures.
    """
    extra = {"range": Range(low, high, more_is)}
    if above is not None:
        return Meta(gt=above, description=text, extra=extra)
    return Meta(ge=0, description=text, extra=extra)

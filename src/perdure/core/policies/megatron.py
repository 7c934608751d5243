"""Megatron-LM: the collective times out, everything exits, the launcher starts it again from the checkpoint.

The number of GPUs is fixed. A node that is lost for good must be replaced by a spare; without one the job
waits, its other nodes idle. Everything since the newest checkpoint is lost.

1. A lost connection is noticed in seconds; every other error shows when the collective gives up.
2. The job goes back to the queue, its processes are set up anew, and all of them load the checkpoint.

The later additions of Megatron and NVRx are settings of the same mechanism: in-job restart (`queue_s = 0`,
`timeout_s = 180`, a shorter `setup_s`), in-process restart (`timeout_s = 60`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from perdure.core.policies.base import (
    Decision,
    Event,
    Fault,
    Layout,
    Lost,
    Method,
    Offered,
    Saving,
    Stage,
    View,
    assumed,
)
from perdure.core.policies.common import Settings, plain_layout
from perdure.core.policies.work import Workload


class MegatronSettings(Settings, frozen=True):
    """Restart of GPT-3 on 256 H800: 30 min of timeout, 9 of queue, 14 of set-up (Unicron, section 2)."""

    connection_s: Annotated[float, assumed("until a lost connection is noticed, s", 1, 30, "worse")] = 5.7
    timeout_s: Annotated[
        float, assumed("until the collective gives up on any other error, s", 600, 1800, "worse")
    ] = 1800.0
    queue_s: Annotated[float, assumed("in the scheduler's queue before a restart, s", 0, 900, "worse")] = (
        540.0
    )
    setup_s: Annotated[
        float, assumed("until restarted processes can load the checkpoint, s", 60, 1200, "worse")
    ] = 840.0
    save_every_s: Annotated[float, assumed("between checkpoints, s", 600, 7200, "either", above=0)] = 1800.0
    write_s: Annotated[float, Meta(ge=0)] | None = None
    """How long a checkpoint stalls the job; None: as long as the shared storage takes to write it."""


class Megatron:
    """Checkpoint and restart on a fixed number of nodes."""

    name: ClassVar[str] = "megatron"
    deals: ClassVar[Literal["queue", "planner"]] = "queue"

    def __init__(self, settings: MegatronSettings) -> None:
        self.settings = settings

    def begin(self, work: Workload, nodes: Sequence[int]) -> Layout | None:
        if work.name in self.settings.measured:
            return self.settings.measured_layout(work, len(nodes))
        return plain_layout(work, len(nodes))

    def decide(self, work: Workload, view: View, event: Event) -> Decision | None:
        if isinstance(event, Fault):
            return self._restart(work, view, event)
        if isinstance(event, Offered) and view.layout is None:
            return self._fill_up(work, view)
        return None  # a notice or a slow node changes nothing: nobody looks

    def saving(self, work: Workload, layout: Layout) -> Saving:
        if self.settings.write_s is not None:
            return Saving(every_s=self.settings.save_every_s, stall_s=self.settings.write_s)
        return Saving(every_s=self.settings.save_every_s, write_bytes=work.state_bytes, waits=True)

    def _restart(self, work: Workload, view: View, fault: Fault) -> Decision:
        detect_s = self.settings.connection_s if fault.method is Method.NODE else self.settings.timeout_s
        if fault.severity != 1:
            return Decision(
                view.layout, "all processes start again", detect_s, self._stages(work), Lost.CHECKPOINT
            )
        missing = view.nominal - len(view.held)
        take = tuple(view.free[:missing])
        if len(take) < missing:
            reason = f"waits for {missing - len(take)} more nodes: the number of GPUs is fixed"
            return Decision(None, reason, detect_s, lost=Lost.CHECKPOINT, take=take)
        reason = f"all processes start again with {len(take)} spare nodes"
        return Decision(view.layout, reason, detect_s, self._stages(work), Lost.CHECKPOINT, take=take)

    def _fill_up(self, work: Workload, view: View) -> Decision | None:
        missing = view.nominal - len(view.held)
        take = tuple(view.free[:missing])
        if not take and missing:
            return None
        if len(take) < missing:
            return Decision(None, f"waits for {missing - len(take)} more nodes", take=take)
        layout = self.begin(work, (*view.held, *take))
        if layout is None:
            return None
        return Decision(layout, "all nodes are there again", stages=self._stages(work)[1:], take=take)

    def _stages(self, work: Workload) -> tuple[Stage, ...]:
        """Queue, set-up and loading; a job that already waits for a node has no queue to wait in."""
        load = Stage("load", read_bytes=work.state_bytes)
        return (Stage("queue", self.settings.queue_s), Stage("set-up", self.settings.setup_s), load)

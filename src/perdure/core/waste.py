"""What a loss costs: the micro-batches that a dead worker had begun and others compute again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perdure.core import assignment
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Plan, Shape


@dataclass(frozen=True)
class Doing:
    """What a worker did when it died: `step` −1: it was in none; `micro_batch` −1: its share was done."""

    step: int = -1
    micro_batch: int = -1


def wasted(
    shape: Shape,
    before: Plan,
    plan: Plan,
    dealt: Collection[int],
    lost: Mapping[WorkerId, Doing | None],
) -> int:
    """How many of the micro-batches that `plan` deals out had been begun by the lost.

    Args:
        shape: the cut of a step.
        before: the plan that the lost worked under.
        plan: the one that answers their loss.
        dealt: the micro-batches of its step that nobody left has or claims.
        lost: what each of them did; None where nobody saw it, which counts its whole share.
    """
    if before.step == plan.step:
        shares, leaves = before.shares, before.leaves
    else:
        shares, leaves = assignment.nominal(shape, plan.step, before.home, before.ranks)
    count = 0
    for worker, doing in lost.items():
        own = {m for leaf in leaves if leaf.worker == worker for m in range(leaf.first, leaf.stop)}
        if doing is not None and doing.step < plan.step:
            continue
        queue = shares.get(worker, ())
        if doing is not None and doing.step == plan.step and doing.micro_batch in queue:
            own -= set(queue[queue.index(doing.micro_batch) + 1 :])
        count += len(own.intersection(dealt))
    return count

"""A worker's part in what is dealt out after a commit: evaluation, saving (`core.tasks`)."""

from __future__ import annotations

from collections.abc import Callable

from perdure.schema import messages as msg
from perdure.schema.errors import UsageError
from perdure.worker.runtime import Runtime

Result = tuple[dict[str, float], float]
"""The values of an item, and their weight."""


def take_part(
    runtime: Runtime, step: int, index: int, count: int, compute: Callable[[int], Result]
) -> msg.EvaluationAll:
    """Compute what is dealt of the task (step, index), `count` items, until all of its results are here.

    Who asks anew after a seal may be dealt an item twice, and one more than the task needed. Raises
    UsageError when another worker takes it for another task, and whatever `compute` raises.
    """
    inbox = runtime.inbox
    known: dict[int, Result] = {}
    asked = -1
    while True:
        with runtime.lock:
            seals = runtime.seals
        if asked != seals:
            asked = seals
            runtime.tell(msg.EvaluationAsk(step, index, count))
        runtime.wait_for_answer(lambda: bool(inbox.deals or inbox.answers), asked)
        with runtime.lock:
            if runtime.seals != asked:
                inbox.deals.clear()
                continue
            inbox.answers = [a for a in inbox.answers if (a.step, a.index) == (step, index)]
            inbox.deals = [d for d in inbox.deals if (d.step, d.index) == (step, index)]
            answer = inbox.answers.pop() if inbox.answers else None
            items = inbox.deals.pop(0).micro_batches if inbox.deals and answer is None else ()
        if answer is not None and len(answer.values) == count:
            return answer
        if answer is not None or max(items, default=0) >= count:
            theirs = len(answer.values) if answer is not None else "more"
            raise UsageError(
                f"after step {step} another worker called job.evaluate or job.save for {theirs} parts where "
                f"this one did for {count}: call the same on all workers, in the same order"
            )
        for item in items:
            if item not in known:
                known[item] = compute(item)
            runtime.tell(msg.EvaluationResult(step, index, item, *known[item]))

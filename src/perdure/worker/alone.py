"""The coordinator of a script that runs without a launcher: one member, nothing to agree upon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perdure.core import assignment
from perdure.core.tasks import Answer, Deal, Tasks
from perdure.schema import messages as msg
from perdure.schema.ids import Generation, WorkerId
from perdure.schema.plan import Address, Plan, Shape
from perdure.state.shelf import publish_save

ME: WorkerId = 0
GENERATION = Generation(1, 1)


class Alone:
    """Answers the only worker's messages as a coordinator would."""

    def __init__(self) -> None:
        self.deliver: Callable[[msg.CoordinatorMessage], None] = lambda _: None
        self._tasks = Tasks()

    def plan(self, shape: Shape) -> Plan:
        """The one generation."""
        home = assignment.homes(shape.blocks, (), (ME,))
        shares, leaves = assignment.nominal(shape, 0, home, (ME,))
        members = (Address(ME, "alone", "", 0),)
        return Plan(GENERATION, members, base=-1, home=home, shares=shares, leaves=leaves)

    def send(self, message: msg.WorkerMessage) -> None:
        """Take a message of the worker; most need no answer."""
        match message:
            case msg.Published(record):
                self.deliver(msg.Acknowledged(record.step))
            case msg.Finished():
                self.deliver(msg.Release())
            case msg.SaveRequest(step, index, partial, path):
                try:
                    publish_save(Path(partial), Path(path), is_over=lambda _: True)
                    self.deliver(msg.SaveAnswer(step, index))
                except OSError as error:
                    self.deliver(msg.SaveAnswer(step, index, str(error)))
            case msg.EvaluationAsk(step, index, count):
                self._deal(self._tasks.ask(ME, (step, index), count))
            case msg.EvaluationResult(step, index, micro_batch, values, weight):
                self._deal(self._tasks.result(ME, (step, index), micro_batch, values, weight))

    def _deal(self, actions: list[Deal | Answer]) -> None:
        for action in actions:
            step, index = action.key
            if isinstance(action, Deal):
                self.deliver(msg.EvaluationDeal(step, index, (action.item,)))
            else:
                values = tuple(dict(value) for value in action.values)
                self.deliver(msg.EvaluationAll(step, index, values, action.weights))

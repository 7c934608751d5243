"""The threads of a simulated worker's groups, one for each generation.

What comes in one generation is handled in its order. Now and then a thread is at work on something for a
while. One that is interrupted meanwhile still does that, and nothing else; what needs the step's memory
waits until then (P1), and the coordinator may have gone on in the meantime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from perdure.schema.ids import NONE, Generation

if TYPE_CHECKING:
    from perdure.sim.protocol.worker import SimWorker

BUSY_SHARE, BUSY_FACTOR = 0.05, 20.0

Call = Callable[[], None]


class Transports:
    """Runs what arrived, and what waits for interrupted groups to be gone."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._at_work: dict[Generation, deque[Call]] = {}
        self._waiting: deque[Call] = deque()
        self.torn_below = NONE

    def arrived(self, generation: Generation, call: Call) -> None:
        """Something came in a generation: handle it by `call`, in its turn."""
        if generation < self.torn_below:
            return
        if generation in self._at_work:
            self._at_work[generation].append(call)
            return
        chance = self._worker.sim.world.chance
        if not chance.flip(BUSY_SHARE):
            call()
            return
        self._at_work[generation] = deque()
        busy_s = chance.between(0.0, BUSY_FACTOR * self._worker.sim.pace.wire_s)
        self._worker.sim.world.after(busy_s, self._worker.guarded(partial(self._through, generation, call)))

    def interrupt(self, below: Generation) -> None:
        """Groups older than this are torn down."""
        self.torn_below = max(self.torn_below, below)

    def when_clear(self, call: Call) -> None:
        """Call at once if no interrupted group is left, else when that is so."""
        self._waiting.append(call)
        self._go_on()

    def _through(self, generation: Generation, call: Call) -> None:
        call()
        queue = self._at_work.pop(generation)
        while queue:
            self.arrived(generation, queue.popleft())
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and all(generation >= self.torn_below for generation in self._at_work):
            self._waiting.popleft()()

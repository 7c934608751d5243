"""Virtual time and chance. Everything that happens in a run is an event here, in an order set by the seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Call = Callable[[], None]

STALL_SHARE = 0.04
STALL_FACTOR = 12.0
"""Of all delays so many are so much longer: most races need one party to be late."""


class DiedError(Exception):
    """The process in which this is raised was killed at this very point."""


class Chance:
    """Delays and choices, all from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def delay(self, typical_s: float) -> float:
        """A time around `typical_s`, now and then much longer."""
        drawn = self._random.random
        factor = STALL_FACTOR if drawn() < STALL_SHARE else 1.0
        return typical_s * factor * (0.2 + 1.6 * drawn())

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self._random.random()

    def flip(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[int(self._random.random() * len(choices))]


class Steady(Chance):
    """No chance at all, for scripted scenarios: every delay is the typical one, every choice the first."""

    def __init__(self) -> None:
        super().__init__(0)

    def delay(self, typical_s: float) -> float:
        return typical_s

    def between(self, low: float, high: float) -> float:
        return low

    def flip(self, probability: float) -> bool:
        return probability >= 1.0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[0]


class World:
    """The clock and what is still to happen. Events at one time happen in the order they were asked for."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Call]] = []
        self._count = 0

    def at(self, time_s: float, call: Call) -> None:
        """Have something happen at a time, not before now."""
        self._count += 1
        heapq.heappush(self._queue, (max(time_s, self.now), self._count, call))

    def after(self, delay_s: float, call: Call) -> None:
        """Have something happen after a while."""
        self.at(self.now + delay_s, call)

    @property
    def idle(self) -> bool:
        """Whether nothing is left that could happen."""
        return not self._queue

    def step(self) -> None:
        """Let the next thing happen. Whoever is killed in the middle of it simply stops there."""
        self.now, _, call = heapq.heappop(self._queue)
        self.events += 1
        try:
            call()
        except DiedError:
            return

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        """Let things happen until a time, or until it is over, or nothing is left."""
        while self._queue and self._queue[0][0] <= until_s and not over():
            self.step()
        if not over():
            self.now = max(self.now, until_s)


class Link:
    """One direction of a connection: takes its time, keeps its order, can be cut."""

    __slots__ = ("_cuts", "_last_s", "_typical_s", "_world")

    def __init__(self, world: World, typical_s: float) -> None:
        self._world = world
        self._typical_s = typical_s
        self._last_s = 0.0
        self._cuts = 0

    def send(self, call: Call) -> float:
        """Have something happen at the other end; the time at which it will, unless the link is cut."""
        world = self._world
        at_s = max(self._last_s, world.now + world.chance.delay(self._typical_s))
        self._last_s = at_s
        cuts = self._cuts

        def deliver() -> None:
            if self._cuts == cuts:
                call()

        world.at(at_s, deliver)
        return at_s

    def cut(self) -> None:
        """What is under way is lost."""
        self._cuts += 1

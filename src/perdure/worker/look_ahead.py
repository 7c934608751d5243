"""Which micro-batch is loaded next, and what came early. No process, no clock, no torch.

Torch's DataLoader keeps a fixed number of requests in flight, `depth`, and answers in the order of the
requests: each batch that is read makes room for one request, and its sampler then names the next one:

1. a batch that is waited for and that nobody has requested yet — it jumps the queue;
2. else the next batch of the look-ahead, unless `depth` have come early already;
3. else nothing at all, an idle request, which a loader answers at once with nothing.

So the sampler never ends. What is in flight ahead of a jump comes early and is kept: at most
2 * `depth` batches. One that came early and is no longer wanted is dropped when its step is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

from perdure.schema.errors import ProtocolError

_SKIPPED_MAX = 10_000  # keys of the look-ahead passed over, because known or absent, per request


class Key(NamedTuple):
    """Names a micro-batch."""

    step: int
    micro_batch: int


class Request(NamedTuple):
    """All that a loader process has to know of a micro-batch: it holds no permutation."""

    key: Key
    epoch: int
    ids: list[int]


class LookAhead:
    """The sampler; see the module's docstring.

    `describe(key)` gives the request that loads a micro-batch, or None for one that has no samples;
    `depth` is how many requests torch keeps in flight.
    """

    def __init__(self, describe: Callable[[Key], Request | None], depth: int) -> None:
        self._describe = describe
        self._depth = depth
        self._demands: deque[Key] = deque()
        self._planned: deque[Key] = deque()
        self._beyond: Iterator[Key] = iter(())
        self._in_flight: set[Key] = set()
        self._early: dict[Key, Any] = {}
        self._taken: set[Key] = set()  # else a look-ahead that lags behind would load them again
        self._first_step = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Request | None:
        """The next request, or None to idle (torch would take the end of a sampler for good)."""
        if self._demands:
            return self._claim(self._demands.popleft())
        if len(self._early) >= self._depth:
            return None
        for _ in range(_SKIPPED_MAX):
            key = self._planned.popleft() if self._planned else next(self._beyond, None)
            if key is None:
                return None
            if self._wanted(key) and (request := self._claim(key)) is not None:
                return request
        return None

    def _wanted(self, key: Key) -> bool:
        known = key in self._early or key in self._in_flight or key in self._taken
        return not known and key.step >= self._first_step

    def _claim(self, key: Key) -> Request | None:
        request = self._describe(key)
        if request is not None:
            self._in_flight.add(key)
        return request

    def plan(self, step: int, keys: list[Key], beyond: Iterator[Key] | None) -> None:
        """Replace the look-ahead; what came early for `step` and is not in it is dropped."""
        self._first_step = min(self._first_step, step)
        wanted = set(keys)
        for key in [key for key in self._early if key.step == step and key not in wanted]:
            del self._early[key]
        self._planned = deque(keys)
        if beyond is not None:
            self._beyond = beyond

    def demand(self, key: Key) -> None:
        """Load `key` next, unless it is on its way. Raises ProtocolError if it has no samples."""
        if self._describe(key) is None:
            raise ProtocolError(
                f"micro-batch {key.micro_batch} of step {key.step} has no samples, yet was asked for"
            )
        if key not in self._in_flight:
            self._demands.append(key)

    def take(self, key: Key) -> tuple[bool, Any]:
        """Note that `key` is being read: (True, the batch) if it came early; it is then gone here."""
        self._taken.add(key)
        if key in self._early:
            return True, self._early.pop(key)
        return False, None

    def arrived(self, key: Key) -> None:
        """A batch was read: it is no longer in flight."""
        self._in_flight.discard(key)

    def keep(self, key: Key, result: Any) -> None:
        """Keep a batch that came early, unless its step is over."""
        if key.step >= self._first_step:
            self._early[key] = result

    def forget(self, before_step: int) -> None:
        """Drop all that belongs to earlier steps."""
        self._first_step = before_step
        self._early = {key: result for key, result in self._early.items() if key.step >= before_step}
        self._taken = {key for key in self._taken if key.step >= before_step}

    @property
    def busy(self) -> bool:
        """Whether a batch is being loaded."""
        return bool(self._in_flight)

    def finish(self) -> None:
        """Name nothing any more."""
        self._demands.clear()
        self._planned.clear()
        self._beyond = iter(())

    def lost(self) -> None:
        """The loader processes are gone, and what was in flight with them."""
        self._planned.extendleft(sorted(self._in_flight, reverse=True))
        self._in_flight.clear()
        self._demands.clear()

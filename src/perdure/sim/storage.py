"""The shared checkpoint storage: a bandwidth that all transfers of the cluster divide evenly."""

from __future__ import annotations

from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Storage(Generic[Owner]):
    """Transfers in progress; each gets the same share of `bytes_s`.

    Whoever drives time asks `next_end` for the next completion after every change, and calls `advance` with
    the time; the answer names the owners of what has ended.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._left: dict[int, float] = {}
        self._owners: dict[int, Owner] = {}
        self._now = 0.0
        self._numbers = 0
        self.moved_bytes = 0.0

    def start(self, now: float, nbytes: float, owner: Owner) -> int:
        """Begin a transfer for `owner`; its number is the answer."""
        self._settle(now)
        self._numbers += 1
        self._left[self._numbers] = nbytes
        self._owners[self._numbers] = owner
        return self._numbers

    def stop(self, now: float, number: int) -> None:
        """Abandon a transfer; one that has ended is ignored."""
        self._settle(now)
        self._left.pop(number, None)
        self._owners.pop(number, None)

    def advance(self, now: float) -> list[tuple[int, Owner]]:
        """Move on to `now`; the numbers and owners of transfers that have ended by then."""
        self._settle(now)
        # A byte is far below what rounding of times of 1e8 s does to transfers of 1e12 bytes.
        slack = 1.0 + 1e-7 * self._bytes_s
        done = [number for number, left in self._left.items() if left <= slack]
        for number in done:
            del self._left[number]
        return [(number, self._owners.pop(number)) for number in done]

    def next_end(self) -> float | None:
        """When the next transfer ends if nothing changes, or None."""
        if not self._left:
            return None
        return self._now + min(self._left.values()) * len(self._left) / self._bytes_s

    def _settle(self, now: float) -> None:
        if self._left and now > self._now:
            share = (now - self._now) * self._bytes_s / len(self._left)
            for number, left in self._left.items():
                self.moved_bytes += min(left, share)
                self._left[number] = max(0.0, left - share)
        self._now = now

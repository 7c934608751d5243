"""The progress page: what a worker is doing, in memory that its agent can read whatever the worker does.

A worker's main thread writes it, the agent reads it, with no call between them; so a hang shows even when
the interpreter is stuck. The counter stands at both ends of the record: a reader that takes the end first
and the start last, and finds both equal, has not seen half of a write.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

PAGE_BYTES: Final = 4096
"""Size of the shared page."""

LIFELINE_BYTES: Final = 4096
"""The page after it: a robust mutex that the worker holds while it lives (`agent.lifeline`)."""

RECORD: Final = struct.Struct("=QQqqQQ")
"""counter, phase, step, micro-batch, samples, counter again."""

_END = struct.Struct("=Q")
_END_AT = RECORD.size - _END.size
_TRIES = 4


class Phase(enum.IntEnum):
    """What a worker's main thread is in; the lower-case name is `phase` of `perdure ps`."""

    SCRIPT = 0
    DATA = 1
    COMPUTE = 2
    REDUCE = 3
    COMMIT = 4
    HEAL = 5
    WAIT = 6


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """One whole record. `counter` rises with every write; step and micro-batch are −1 when there is none."""

    counter: int
    phase: Phase
    step: int
    micro_batch: int
    samples: int


def read(page: memoryview) -> Snapshot | None:
    """The record in `page`; None if it was being written at each of a few tries, or holds nonsense."""
    for _ in range(_TRIES):
        (end,) = _END.unpack_from(page, _END_AT)
        start, phase, step, micro_batch, samples, _ = RECORD.unpack_from(page, 0)
        if start == end:
            return Snapshot(start, Phase(phase), step, micro_batch, samples) if phase in _PHASES else None
    return None


_PHASES = frozenset(Phase)

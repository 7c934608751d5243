"""What the step transaction needs of a transport, and what a transport tells it.

One `Transport` is one generation's group of workers. It is made once, formed in the background, used until
the generation ends, and never used again after a failure (P11). `mesh.Mesh` is the one for CPU tensors;
docs/decisions/transport.md says why, and what another one has to keep.

    owner of a leaf                            owner of a shard
    ───────────────                            ────────────────
    post(peer, Bulk(...), buffers) ──────────▶ handlers.buffer(...)  where to put it: a view, None, LATER
                                               … the bytes land there, with no copy on the way
    on_sent()                      ◀────────── handlers.bulk(...)    they are complete
    tell(peer, body)               ──────────▶ handlers.control(...)

Everything that a transport calls, it calls on its own one thread, one at a time, never while it holds a
lock, and never after `close` has returned.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from perdure.schema.ids import Generation, WorkerId


class Bulk(NamedTuple):
    """What a payload is: part of a leaf on its way to be folded, or a finished shard on its way back.

    `kind` belongs to the caller (0 … 255). The payload is elements `lo` … `hi`−1 of bucket `bucket` in
    step `step`; `first` is the leaf's first micro-batch; `meta` carries what else goes with it, presence
    bits for one (at most `frames.META_LIMIT` bytes).
    """

    kind: int
    step: int
    bucket: int
    first: int
    lo: int
    hi: int
    meta: bytes = b""


class Later(enum.Enum):
    """The answer of `Handlers.buffer` that leaves a payload with its sender until `Transport.take`."""

    LATER = "later"


LATER = Later.LATER


class Handlers(Protocol):
    """The receiving side of one transport."""

    def formed(self) -> None:
        """Every peer's transport of this generation exists and is connected to this one.

        A group of one is formed at once, maybe before its constructor has returned.
        """

    def buffer(
        self, peer: WorkerId, header: Bulk, nbytes: int, deferrable: bool
    ) -> memoryview | Later | None:
        """Where to put a payload of `nbytes`: a writable byte view of that size, or None to drop it.

        LATER is allowed when `deferrable`: the payload then stays in the sender's memory until `take`. It
        may be asked again for the same payload, with `deferrable` false, when that memory proves unreadable.
        """

    def bulk(self, peer: WorkerId, header: Bulk, view: memoryview) -> None:
        """The payload is complete in `view`, which is the one that `buffer` gave."""

    def control(self, peer: WorkerId, body: bytes) -> None:
        """A small message arrived; it keeps its place among the payloads of the same peer."""

    def lost(self, peer: WorkerId, reason: str) -> None:
        """The connection to a peer failed. Said once a peer, and not after `interrupt` or `retire`.

        A peer that was never connected is not lost but awaited, until the transport is interrupted.
        """

    def broken(self, error: Exception) -> None:
        """A handler raised, or the transport itself is defective: it has stopped for good."""


class Transport(Protocol):
    """One generation's group, seen from one worker. Every method may be called from any thread."""

    generation: Generation

    def wait_formed(self, timeout_s: float) -> bool:
        """Wait until the group is formed; false when it is not in time, or will never be."""

    def post(
        self,
        peer: WorkerId,
        header: Bulk,
        buffers: Sequence[memoryview],
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a payload that is the buffers' bytes in order, without copying them first.

        The buffers must not change until `on_sent` was called, on whatever thread (P2). After a loss or
        an interruption a post goes nowhere and `on_sent` is never called; it raises nothing.
        """

    def tell(self, peer: WorkerId, body: bytes) -> None:
        """Send a small message, in order with the payloads posted to the same peer."""

    def take(self, peer: WorkerId, header: Bulk) -> None:
        """Ask again for the buffer of a payload that was put off. Only from inside a handler or `submit`."""

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the transport's thread soon; dropped once the transport has stopped."""

    def outstanding(self, step: int) -> int:
        """How many payloads of steps ≤ `step` were posted here and are not known to be sent (P2)."""

    def interrupt(self) -> None:
        """Tear everything down now: whatever waits anywhere in the group is let go within milliseconds."""

    def retire(self, timeout_s: float) -> None:
        """End gracefully in the background: what was sent still arrives. `interrupt` cuts it short."""

    def close(self) -> None:
        """Interrupt, and wait until nothing of it is left: no thread, no descriptor. Idempotent.

        Whoever calls it may hold no lock that a handler takes: the thread may be inside that handler.
        """

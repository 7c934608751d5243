"""One peer as a mesh sees it: how far its connection is, and what is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perdure.schema.errors import WireError
from perdure.schema.plan import Address
from perdure.worker.channel import Buffer, Channel
from perdure.worker.dial import Dialer
from perdure.worker.frames import Head
from perdure.worker.memory import Pieces
from perdure.worker.pull import Remote
from perdure.worker.transport import Bulk


class Offered(NamedTuple):
    """A posted payload, held until it is sent."""

    header: Bulk
    pieces: Pieces
    on_sent: Callable[[], None] | None


class Peer:
    """State of the pair (this worker, one peer).

    The mesh's thread owns it. Any thread posts, so `up` and `early`, what waits for it, change under the
    mesh's lock alone, and offers are made under it.
    """

    def __init__(self, address: Address, dialer: Dialer | None) -> None:
        self.address = address
        self.dialer = dialer
        self.channel: Channel | None = None
        self.remote: Remote | None = None
        self.heard = False
        self.up = False
        self.over = False
        self.left = False
        self.said_bye = False
        self.finished = False
        self.writing = False
        self.waiting: dict[Bulk, tuple[Head, bytes]] = {}
        self.offers: dict[int, Offered] = {}
        self.reads_here: bool | None = None
        self._ticket = 0
        self.early: list[Callable[[], None]] = []

    def push(self, buffers: Sequence[Buffer], done: Callable[[], None] | None = None) -> None:
        """Queue a frame on the connection, if there is one."""
        if self.channel is not None:
            self.channel.push(buffers, done)

    def ready(self, reads_here: bool | None) -> None:
        """READY came (whether the peer reads this memory), or HELLO did (None): with both it is up."""
        if reads_here is not None:
            self.reads_here = reads_here
        if self.heard and self.reads_here is not None and not self.up:
            self.up = True
            for push in self.early:
                push()
            self.early.clear()

    def offer(self, offered: Offered) -> int:
        """Keep a payload until its ticket, which is returned, is settled."""
        self._ticket = (self._ticket + 1) & 0xFFFFFFFF
        self.offers[self._ticket] = offered
        return self._ticket

    def settle(self, ticket: int) -> Offered:
        """The payload of a ticket; raises WireError on one that was never given out."""
        offered = self.offers.pop(ticket, None)
        if offered is None:
            raise WireError(f"an answer to offer {ticket}, which was not made")
        return offered

    def abandon(self) -> list[Offered]:
        """Let go of every payload that is under way."""
        offers = list(self.offers.values())
        self.offers.clear()
        return offers

    def connect(self, channel: Channel) -> None:
        """Use `channel` from now on."""
        self.disconnect()
        self.channel = channel

    def disconnect(self) -> None:
        """Close what is open; what the peer put off is gone with it."""
        if self.dialer is not None:
            self.dialer.close()
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.remote is not None:
            self.remote.close()
            self.remote = None
        self.waiting.clear()
        self.writing = False

    def sever(self) -> None:
        """Cut the connection, from any thread."""
        channel = self.channel
        if channel is not None:
            channel.sever()

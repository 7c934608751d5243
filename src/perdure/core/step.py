"""What a worker knows of the step in progress: its own part, and what the members said of it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.core.exchange import Exchange
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Entry, Header, Run, Span


@dataclass
class Work:
    """The step in progress: committed+1."""

    held: tuple[Run, ...] = ()
    in_hand: int | None = None
    queue: list[int] = field(default_factory=list)
    reduced: tuple[Span, ...] = ()
    ledger: dict[int, Entry] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    vouched: set[int] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)

    def vouch(self, header: Header) -> None:
        """A header is here: a worker stands for its leaves, and for the state they were computed from."""
        if header.fine:
            self.vouched.update(entry.micro_batch for entry in header.entries)
            self.digests.add(header.digest)


@dataclass
class Round:
    """One (generation, step): what the members said of it."""

    exchange: Exchange | None = None
    headers: dict[WorkerId, Header] = field(default_factory=dict)
    holds: set[WorkerId] = field(default_factory=set)
    sends_complete: bool = False
    whole: bool = False
    refused: bool = False
    started: bool = False

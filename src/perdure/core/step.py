"""What a worker knows of the step in progress: its own part, and what the members said of it. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from perdure.core.exchange import Exchange, covered
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Entry, Header, Leaf, Record, Run, Span


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

    def pile_is_spoilt(self, own_leaves: Iterable[Leaf]) -> bool:
        """A pile is used whole or not at all: not if the plan names another provider for a part of it."""
        return not covered(self.held) <= covered(own_leaves)


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


def with_digest(record: Record, digest: str) -> Record:
    """The record with the digest of the state after its step."""
    return msgspec.structs.replace(record, digest=digest)

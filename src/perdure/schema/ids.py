"""Identities: what a generation is, and how ids are written."""

from __future__ import annotations

import msgspec

WorkerId = int
"""Unique within a job and never used again, so that a late message cannot be taken for a newer worker's."""


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A numbered membership of a job (P9).

    `incarnation` counts the coordinator's starts and is on disk before it is used, `number` counts the
    memberships within one incarnation; together they are never used twice.
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


NONE = Generation(0, 0)
"""Older than every real generation: what a worker has that belongs to none yet."""

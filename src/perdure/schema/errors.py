"""Every error that perdure raises, on one page, split by who has to act.

    PerdureError
    ├── UsageError          the person at the command line or in the script: wrong input (exit 4)
    │   └── ProtectError    … a model, optimizer or loop that cannot be made exact, with what to do instead
    ├── RestoreError        saved state exists but could not be restored (exit 5)
    ├── OrphanedError       an agent's coordinator is gone for too long (exit 1)
    ├── ZygoteGoneError     the process that forks workers ended; the agent asks another
    ├── WireError           a peer sent what the protocol does not allow; the connection is closed
    └── ProtocolError       a rule of docs/protocol.md was broken: a defect of perdure itself

The exit code sits on the class, so that nobody has to keep a second table. How a run ended is no error of
perdure's: that the script failed (1), failures were too many (3) or a signal asked for the end (130, 143) is
decided in `core` and told to the agents.
"""

from __future__ import annotations

from typing import ClassVar


class PerdureError(Exception):
    """Base of every error that perdure raises."""

    exit_code: ClassVar[int] = 1


class UsageError(PerdureError):
    """Bad input: the message is one line that says what was wrong, where, what was expected, what to do."""

    exit_code: ClassVar[int] = 4


class ProtectError(UsageError):
    """The script asks for something that cannot be kept exact; the message says what to do instead."""


class RestoreError(PerdureError):
    """Saved state exists but none of it could be restored."""

    exit_code: ClassVar[int] = 5


class OrphanedError(PerdureError):
    """No coordinator for `orphan_s` seconds."""


class ZygoteGoneError(PerdureError):
    """The zygote ended before it answered. Whether it forked is unknown: use new descriptors to ask again."""


class WireError(PerdureError):
    """A frame could not be accepted: too large, malformed, of an unknown type, or not authenticated."""


class ProtocolError(PerdureError):
    """A rule of the protocol was broken. This is a defect of perdure; the message names the rule."""

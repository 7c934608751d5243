"""What a test asks of the workers of its run, and what they leave for it to find; see `traps`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from perdure.chaos.faults import Fault, Manner
from perdure.schema.ids import WorkerId

FILE = "scenario.json"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one run.

    With `whole` every worker waits in each commit until `members` of them are at work, or will be after the
    next step; none that was struck counts. So the faults' steps are the same in every run, however long a new
    worker takes.
    """

    faults: tuple[Fault, ...] = ()
    whole: bool = False
    members: int = 4
    jitter: float = 0.0

    def lay_out(self, directory: Path) -> None:
        """Write it where the workers read it."""
        (directory / FILE).write_bytes(msgspec.json.encode(self))

    @staticmethod
    def read(directory: Path) -> Scenario:
        """What `lay_out` wrote."""
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Scenario)


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker notes just before a fault strikes it; one for each that is struck with it, too."""

    name: str
    manner: Manner
    pid: int
    worker: WorkerId
    step: int | None
    rank: int | None
    thread: str

    def note(self, directory: Path) -> None:
        """Leave it for the test; whole or not at all."""
        aside = directory / f"{self.name}.aside"
        aside.write_bytes(msgspec.json.encode(self))
        aside.rename(directory / f"{self.name}.fired")


def strikes(directory: Path) -> dict[str, Strike]:
    """The faults that struck, by name."""
    found = [msgspec.json.decode(path.read_bytes(), type=Strike) for path in directory.glob("*.fired")]
    return {strike.name: strike for strike in found}

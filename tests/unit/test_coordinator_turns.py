"""What the coordinator does with hard state: one thing at a time, in the order in which it came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.coordinator.server import Ports, Server
from perdure.core.job import Job
from perdure.core.settings import Settings
from perdure.schema import messages as msg

DEADLINE_S = 10.0


class SlowDisk:
    """Publishes what it is told to, each when the test lets it go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def publish_save(self, partial: Path, target: Path, is_over: Callable[[str], bool]) -> None:
        self._do(str(partial))
        assert is_over("w3"), "it is of an earlier life"
        assert is_over("w7"), "it has exited"
        assert not is_over("w8")

    def publish(self, partial: Path) -> Path:
        self._do(str(partial))
        return partial.with_suffix("")

    def discard(self, writer: str) -> None:
        self._do(writer)

    def prune(self, leftovers: bool) -> None:
        """Nothing is old here."""

    def _do(self, what: str) -> None:
        self.begun.append(what)
        assert self.go_on.wait(DEADLINE_S)


def served(act: Callable[[Server], list[Any]]) -> tuple[list[str], list[str]]:
    """What was begun while the disk stood still, and in all."""

    async def serve() -> tuple[list[str], list[str]]:
        disk = SlowDisk()
        ports: Any = Ports(disk, disk.publish_save, print, lambda *_: None)  # type: ignore[arg-type]
        nothing: Any = None
        server = Server(
            Job(Settings(job="j", incarnation=1, home_node="a", first_worker=5)), b"secret", nothing, ports
        )
        server._exited.add(7)
        tasks = [asyncio.create_task(work) for work in act(server)]
        while not disk.begun:
            await asyncio.sleep(0)
        await asyncio.to_thread(lambda: None)  # whatever was handed to a thread before this has begun now
        first = list(disk.begun)
        disk.go_on.set()
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        return first, disk.begun

    return asyncio.run(serve())


def test_saves_are_put_in_place_one_after_the_other() -> None:
    """The dead worker's is, and then that of the one which was dealt it again."""
    requests = [msg.SaveRequest(4, 0, f"/d/.x.w{worker}.partial", "/d/x") for worker in (7, 8)]
    first, begun = served(lambda server: [server._publish_save(8, request) for request in requests])
    assert first == [requests[0].partial]
    assert begun == [request.partial for request in requests]


def test_what_a_writer_left_is_removed_after_what_it_wrote_was_published() -> None:
    written = msg.CheckpointWritten(4, "d", "/c/step-000000004-w7.1.partial", 10, 0.1)
    first, begun = served(lambda server: [server._publish(written), server._discard(7)])
    assert first == [written.partial]
    assert begun == [written.partial, "w7"]

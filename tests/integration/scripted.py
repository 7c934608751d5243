"""A coordinator that does what a test says, on the real wire, and the real agent beside it."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from perdure.agent.agent import Agent, AgentConfig, Ended
from perdure.agent.link import Target
from perdure.schema.messages import (
    AgentHello,
    AgentMessage,
    AgentWelcome,
    CoordinatorToAgent,
    EndAgent,
    FromWorker,
    StartWorker,
    WorkerExited,
    WorkerMessage,
    WorkerStarted,
)
from perdure.schema.wire import NONCE_BYTES, Decoder, FrameReader, Handshake, Role, encode

SECRET = b"a secret of a test, long enough"
DEADLINE_S = 30.0

M = TypeVar("M")


class ScriptedCoordinator:
    """Accepts agents that know `secret`; everything that they say is in `heard`, in order."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.secret = secret
        self.heard: list[AgentMessage] = []
        self.connections = 0
        self.port = 0
        self._changed = asyncio.Condition()
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._decoder: Decoder[WorkerMessage] = Decoder(WorkerMessage)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Go away as a crashed coordinator does."""
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        await asyncio.sleep(0)  # no wait: the transport's own callback closes the socket

    def say(self, message: CoordinatorToAgent) -> None:
        assert self._writer is not None
        self._writer.write(encode(message))

    async def hear(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True, since: int = 0) -> M:
        """The first message of a kind, from `heard[since]` on, that matches; waits for it."""

        def found() -> list[M]:
            return [one for one in self.heard[since:] if isinstance(one, kind) and matches(one)]

        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(found)
        return found()[0]

    def said_by(self, worker: int) -> list[WorkerMessage]:
        """What a worker has said so far."""
        bodies = [one.body for one in self.heard if isinstance(one, FromWorker) and one.worker == worker]
        return [self._decoder.decode(body) for body in bodies]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = Handshake(
            self.secret, Role.COORDINATOR, os.urandom(NONCE_BYTES), {Role.AGENT}, initiator=False
        )
        frames: FrameReader[AgentMessage] = FrameReader(AgentMessage)
        try:
            while not handshake.done:
                writer.write(handshake.feed(await _some(reader)))
            messages = frames.feed(handshake.rest)
            while True:
                for message in messages:
                    if isinstance(message, AgentHello):
                        self._writer = writer
                        self.connections += 1
                        self.say(AgentWelcome(job="test", incarnation=1, rank=0, nodes=1))
                async with self._changed:
                    self.heard += messages
                    self._changed.notify_all()
                messages = frames.feed(await _some(reader))
        except Exception:
            writer.transport.abort()


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(65536)
    if not data:
        raise EOFError
    return data


class Stage:
    """A scripted coordinator, a real agent beside it, and what the agent showed.

    Workers run `script`, which a test writes before it starts one.
    """

    def __init__(self, directory: Path, orphan_s: float = 20.0) -> None:
        self.directory = directory
        self.script = directory / "script.py"
        self.logs = directory / "run" / "logs"
        self.coordinator = ScriptedCoordinator()
        self.orphan_s = orphan_s
        self.shown: list[tuple[str, bool]] = []
        self._next_worker = 0

    async def open(self) -> None:
        """Start both; returns when the agent has said hello."""
        await self.coordinator.open()
        self.task = asyncio.create_task(self.open_agent())
        await self.coordinator.hear(AgentHello)

    async def open_agent(self) -> Ended:
        """Run the agent alone to its end."""
        config = AgentConfig(
            node="here",
            host="127.0.0.1",
            target=Target(
                host="127.0.0.1", port=self.coordinator.port, secret=SECRET, orphan_s=self.orphan_s
            ),
            run_dir=self.directory / "run",
            script=(str(self.script), "an", "argument"),
            workers=2,
            directory=self.directory,
        )
        self.agent = Agent(config, lambda line, error: self.shown.append((line, error)))
        return await self.agent.run()

    async def close(self) -> Ended:
        """End the job and both."""
        self.coordinator.say(EndAgent(0, "the end"))
        async with asyncio.timeout(DEADLINE_S):
            ended = await self.task
        await self.coordinator.close()
        return ended

    async def start(self, source: str, env: dict[str, str] | None = None) -> tuple[int, int]:
        """Worker id and pid of a new worker that runs `source`."""
        worker = self.order(source, env)
        started = await self.coordinator.hear(WorkerStarted, lambda one: one.worker == worker)
        return worker, started.pid

    def order(self, source: str, env: dict[str, str] | None = None) -> int:
        """Ask for a worker that runs `source`, and return its id at once."""
        worker = self._next_worker
        self._next_worker += 1
        self.script.write_text(textwrap.dedent(source))
        self.coordinator.say(StartWorker(worker, env or {}))
        return worker

    def lines(self, worker: int) -> list[str]:
        """What a worker has printed, as it was shown."""
        prefix = f"[worker {worker}] "
        return [line.removeprefix(prefix) for line, _ in self.shown if line.startswith(prefix)]

    def zygote_pid(self) -> int:
        """The process that forks this agent's workers."""
        pid = self.agent._zygote.pid
        assert pid is not None
        return pid

    async def exit_of(self, worker: int) -> WorkerExited:
        """How a worker ended, when it has."""
        return await self.coordinator.hear(WorkerExited, lambda one: one.worker == worker)

    async def run(self, source: str) -> tuple[int, WorkerExited]:
        """Run `source` to its end in a new worker: its id and how it ended."""
        worker, _ = await self.start(source)
        return worker, await self.exit_of(worker)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds: for what sends no message, such as a process that is gone."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)  # other processes' ends give this one no event


def living(pids: list[int]) -> list[int]:
    """Those of `pids` that are processes still, zombies too."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

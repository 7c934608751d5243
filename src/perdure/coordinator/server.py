"""The coordinator's server: carries events to `core.job.Job` and its actions to agents and files.

    agent ──TCP, proved──▶ _serve ──▶ Job.<event>(…, now) ──▶ actions ──▶ agents, run directory, shelf

It decides nothing. Every connection proves the job's secret first; a stranger costs a bounded time, is
logged as `refused`, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from perdure.coordinator.rundir import RunDir
from perdure.core import job as core
from perdure.core.job import Job
from perdure.schema import messages as msg
from perdure.schema.errors import UsageError, WireError
from perdure.schema.ids import WorkerId
from perdure.schema.plan import Record
from perdure.schema.wire import NONCE_BYTES, Decoder, FrameReader, Handshake, Role, body, encode

TICK_S = 0.1
HANDSHAKE_S = 5.0
CLOSE_S = 1.0
UNPROVED_MAX = 64
_CHUNK = 1 << 18


class ShelfPort(Protocol):
    """What the coordinator needs of the shelf that checkpoints lie on."""

    def publish(self, partial: Path) -> Path:
        """Rename what was written aside into place."""

    def prune(self, keep: int = 2, leftovers: bool = True) -> list[Path]:
        """Remove what is no longer needed."""

    def discard(self, writer: str) -> None:
        """Remove what a writer that is no more has not finished."""

    def newest_first(self) -> list[Path]:
        """The published checkpoints."""


@dataclass(frozen=True)
class Ports:
    """What the server is given: where checkpoints lie, how a save is published, whom to show what."""

    shelf: ShelfPort
    publish_save: Callable[[Path, Path, Callable[[str], bool]], None]
    say: Callable[[str], None]
    on_record: Callable[[Record, Job], None]


class Server:
    """One job's coordinator. Make it, `start_on` a socket, `close` it when the agent has ended."""

    def __init__(self, job: Job, secret: bytes, run_dir: RunDir, ports: Ports) -> None:
        self.job = job
        self.ended: asyncio.Future[core.End] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._shelf_turn, self._saves_turn = asyncio.Lock(), asyncio.Lock()
        self._exited: set[WorkerId] = set()
        self._run_dir = run_dir
        self._ports = ports
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._open: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._unproved = 0
        self._defective = False
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._master_port: dict[int, int] = {}
        self._decoder: Decoder[msg.WorkerMessage] = Decoder(msg.WorkerMessage)

    async def start_on(self, sock: socket.socket) -> tuple[str, int]:
        """Serve on a bound socket; returns its address."""
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=_CHUNK)
        self._ticking = asyncio.create_task(self._tick())
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Stop listening, finish what runs in the background."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for writer in self._open.values():
            writer.close()
        if self._background:
            await asyncio.wait(self._background, timeout=30)
        if self._open:
            # They come to an end of their own: asyncio would show one that it cancels as an error.
            await asyncio.wait(self._open, timeout=CLOSE_S)

    # ── connections ─────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _name(writer)
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        try:
            if self._unproved >= UNPROVED_MAX:
                raise WireError("too many connections that have not proved the secret")
            self._unproved += 1
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    handshake = await self._prove(reader, writer)
            finally:
                self._unproved -= 1
            _no_delay(writer)
            if handshake.peer is Role.OBSERVER:
                await self._observe(reader, writer, handshake.rest)
            else:
                await self._listen(reader, writer, handshake.rest)
        except (WireError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, WireError | TimeoutError) and not self.ended.done():
                reason = str(error) or "no proof of the secret in time"
                self._run_dir.event("refused", {"message": reason, "peer": peer})
                self._ports.say(f"refused a connection from {peer}: {reason}")
        finally:
            del self._open[task]
            writer.close()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handshake:
        handshake = Handshake(
            self._secret,
            Role.COORDINATOR,
            os.urandom(NONCE_BYTES),
            {Role.AGENT, Role.OBSERVER},
            initiator=False,
        )
        while not handshake.done:
            data = await reader.read(_CHUNK)
            if not data:
                raise WireError("closed before it proved the secret")
            writer.write(handshake.feed(data))
        return handshake

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        """An agent's connection, to its end."""
        frames: FrameReader[msg.AgentMessage] = FrameReader(msg.AgentMessage)
        node: str | None = None
        try:
            while True:
                for message in frames.feed(data):
                    if isinstance(message, msg.AgentHello):
                        node = self._greet(message, writer)
                    elif node is None:
                        raise WireError(f"{type(message).__name__} before a hello")
                    self._take(node, message)
                data = await reader.read(_CHUNK)
                if not data:
                    return
        finally:
            if node is not None and self._agents.get(node) is writer:
                del self._agents[node]
                lost = node
                self._act(lambda now: self.job.agent_lost(lost, now))

    def _greet(self, hello: msg.AgentHello, writer: asyncio.StreamWriter) -> str:
        old = self._agents.pop(hello.node, None)
        if old is not None:
            old.close()
        self._agents[hello.node] = writer
        known = self.job.staff.nodes
        rank = known[hello.node].rank if hello.node in known else self.job.staff.free_rank
        settings = self.job.settings
        words = (settings.job, settings.incarnation, rank, settings.min_nodes, settings.key)
        writer.write(encode(msg.AgentWelcome(*words)))
        return hello.node

    def _take(self, node: str, message: msg.AgentMessage) -> None:
        job = self.job
        match message:
            case msg.AgentHello():
                grows = job.membership.begun and node not in job.staff.nodes
                self._act(lambda now: job.agent_joined(message, now))
                if grows and node in job.staff.nodes:
                    self._say(f"node {node} joins with {message.workers} worker{'s' * (message.workers > 1)}")
            case msg.WorkerStarted(worker, pid):
                self._act(lambda now: job.worker_started(worker, pid, now))
            case msg.WorkerEnding():
                self._act(lambda now: job.worker_ending(message, now))
            case msg.WorkerExited(worker):
                self._exited.add(worker)
                self._in_background(self._discard(worker))
                self._act(lambda now: job.worker_exited(message, now))
            case msg.FromWorker(worker, raw):
                said = self._decoder.decode(raw)
                self._act(lambda now: job.worker_said(worker, said, now))
            case msg.Status():
                job.status(message)
            case msg.Asked(signum):
                self._act(lambda now: job.asked(signum, now, node))

    async def _observe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        frames: FrameReader[msg.PsRequest] = FrameReader(msg.PsRequest)
        while True:
            for _ in frames.feed(data):
                writer.write(encode(msg.PsReply(self.job.rows())))
                await writer.drain()
            data = await reader.read(_CHUNK)
            if not data:
                return

    async def _tick(self) -> None:
        while not self.ended.done():
            await asyncio.sleep(TICK_S)
            self._act(self.job.tick)

    # ── actions ─────────────────────────────────────────────────────────────────────────────────────

    def _act(self, event: Callable[[float], list[core.Action]]) -> None:
        """Let the job take an event and carry out its answer; an error in there is shown and ends the run."""
        if self._defective:
            return
        try:
            self._carry_out(event(time.monotonic()))
        except Exception as error:
            self._defective = True
            trace = "".join(traceback.format_exception(error)).rstrip()
            then = "run it again: it goes on from its newest checkpoint, or begins anew if it has none"
            self._end(core.End(1, f"{trace}\nperdure: the coordinator of this run failed; {then}"))

    def _carry_out(self, actions: Sequence[core.Action]) -> None:
        for action in actions:
            match action:
                case core.Send(worker, message):
                    self._to_worker(worker, message)
                case core.Start():
                    self._start_worker(action)
                case core.Kill(worker, signum):
                    self._to_node_of(worker, msg.StopWorker(worker, signum))
                case core.TurnAway(node, text, exit_code):
                    if (writer := self._agents.pop(node, None)) is not None:
                        _tell(writer, msg.EndAgent(exit_code, text))
                case core.Event(name, fields):
                    self._run_dir.event(name, fields)
                case core.WriteRecord(record):
                    self._run_dir.record(record)
                    self._ports.on_record(record, self.job)
                case core.PublishCheckpoint(written):
                    self._in_background(self._publish(written))
                case core.PublishSave(worker, request):
                    self._in_background(self._publish_save(worker, request))
                case core.Discard(partial):
                    self._in_background(self._remove(Path(partial)))
                case core.Persist(blocks):
                    self._run_dir.keep(msgspec.structs.replace(self._run_dir.job, blocks=blocks))
                case core.GiveUp(workers):
                    known = self._run_dir.job
                    given_up = (*known.given_up, *workers)
                    self._run_dir.keep(msgspec.structs.replace(known, given_up=given_up))
                case core.Say(text):
                    self._say(text)
                case core.End():
                    self._end(action)

    def _say(self, text: str) -> None:
        """A line about the job, on the terminals of all its nodes."""
        self._ports.say(text)
        for node, writer in self._agents.items():
            if node != self.job.settings.home_node:
                _tell(writer, msg.Notice(text))

    def _to_worker(self, worker: WorkerId, message: msg.CoordinatorMessage) -> None:
        self._to_node_of(worker, msg.ToWorker(worker, body(message)))

    def _to_node_of(self, worker: WorkerId, message: msg.CoordinatorToAgent) -> None:
        who = self.job.staff.workers.get(worker)
        writer = self._agents.get(who.node) if who is not None else None
        if writer is not None:
            _tell(writer, message)

    def _start_worker(self, start: core.Start) -> None:
        nodes = self.job.staff.nodes
        node = nodes[start.node]
        first = min(nodes.values(), key=lambda n: n.rank)
        if start.attempt not in self._master_port:
            self._master_port = {start.attempt: _free_port()}
        env = {
            "RANK": str(start.rank),
            "LOCAL_RANK": str(start.local_rank),
            "WORLD_SIZE": str(start.world),
            "LOCAL_WORLD_SIZE": str(node.workers),
            "GROUP_RANK": str(node.rank),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(start.rank),
            "ROLE_WORLD_SIZE": str(start.world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": first.host,
            "MASTER_PORT": str(self._master_port[start.attempt]),
            "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.job.settings.max_failures),
            "TORCHELASTIC_RUN_ID": self.job.settings.job,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        used = max(self._run_dir.job.next_worker, start.worker + 1)
        self._run_dir.keep(msgspec.structs.replace(self._run_dir.job, next_worker=used))
        writer = self._agents.get(start.node)
        if writer is not None:
            _tell(writer, msg.StartWorker(start.worker, env))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # On each of the two places of hard state one thing is done at a time, in the order in which it came.

    async def _publish(self, written: msg.CheckpointWritten) -> None:
        path, reason = "", ""
        async with self._shelf_turn:
            try:
                path = str(await asyncio.to_thread(self._ports.shelf.publish, Path(written.partial)))
            except OSError as error:
                reason = str(error)
            self._act(lambda now: self.job.published(written, path, reason, now))
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._ports.shelf.prune, leftovers=False)

    async def _discard(self, writer: WorkerId) -> None:
        async with self._shelf_turn:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._ports.shelf.discard, f"w{writer}")

    async def _remove(self, partial: Path) -> None:
        async with self._shelf_turn:
            await asyncio.to_thread(shutil.rmtree, partial, True)

    async def _publish_save(self, worker: WorkerId, request: msg.SaveRequest) -> None:
        reason = ""
        async with self._saves_turn:
            try:
                partial, target = Path(request.partial), Path(request.path)
                await asyncio.to_thread(self._ports.publish_save, partial, target, self._is_over)
            except OSError as error:
                reason = str(error)
        self._act(lambda now: self.job.saved(worker, request, reason, now))

    def _is_over(self, writer: str) -> bool:
        """Whether the worker of that name (`w7`) has exited, or is of an earlier life of the run."""
        worker = int(writer.removeprefix("w"))
        return worker < self.job.settings.first_worker or worker in self._exited

    def _end(self, end: core.End) -> None:
        for writer in self._agents.values():
            _tell(writer, msg.EndAgent(end.exit_code, end.message))
        if not self.ended.done():
            self.ended.set_result(end)


def _tell(writer: asyncio.StreamWriter, message: msg.CoordinatorToAgent) -> None:
    """Send; a connection that is lost takes nothing, and asyncio would print that it did not."""
    if not writer.is_closing():
        writer.write(encode(message))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else "unknown"


def _no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--coordinator {text!r}: expected HOST:PORT with a port from 1 to 65535")
    return host, int(port)

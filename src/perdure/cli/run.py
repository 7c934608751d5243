"""`perdure run`: an agent, and the job's coordinator if this launcher is the first to bind its address."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perdure.agent.agent import Agent, AgentConfig
from perdure.agent.link import Target
from perdure.agent.secret import new_secret, read_or_make_secret
from perdure.cli.terminal import Terminal
from perdure.coordinator.rundir import RunDir
from perdure.coordinator.server import Ports, Server, address
from perdure.core.job import Job, Settings
from perdure.report import write_report
from perdure.schema.errors import UsageError
from perdure.state import shelf

ACCESS = "coordinator.json"


class Access(msgspec.Struct, frozen=True):
    """How `perdure ps` reaches a running coordinator; the file is readable by its owner alone."""

    host: str
    port: int
    secret: str
    pid: int


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure run`."""
    add = parser.add_argument
    add(
        "--nproc-per-node",
        type=_count("--nproc-per-node", 1),
        default=1,
        metavar="N",
        help="workers on this node",
    )
    add(
        "--standby",
        type=_count("--standby", 0),
        default=0,
        metavar="K",
        help="workers that wait at their first step",
    )
    add("--nnodes", default="1", metavar="MIN[:MAX]", help="nodes that the job starts with, and may grow to")
    add("--coordinator", metavar="HOST:PORT", help="where the nodes meet; the first that can bind it serves")
    add("--secret", type=Path, metavar="FILE", help="the nodes' shared secret; made (0600) if absent")
    add(
        "--run-dir", type=Path, metavar="DIR", help="metrics, events, logs, checkpoints; given again: resumed"
    )
    add("--fresh", action="store_true", help="forget what is in the run directory and start anew")
    add(
        "--checkpoint-every",
        type=_count("--checkpoint-every", 0),
        metavar="N",
        help="steps; 0: never; default: a minute",
    )
    add(
        "--max-failures",
        type=_count("--max-failures", 0),
        default=1000,
        metavar="N",
        help="give up after so many",
    )
    add(
        "--digest-every",
        type=_count("--digest-every", 1),
        default=1,
        metavar="N",
        help="digest the state each N steps",
    )
    add("--log-samples", action="store_true", help="write samples.jsonl: who computed which samples")
    add("--policy", choices=["perdure"], default="perdure", help="the recovery policy")
    add("-m", dest="module", action="store_true", help="run a module instead of a script")
    add("script", metavar="SCRIPT", help="the training script (with -m: the module)")
    add("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def run(args: argparse.Namespace) -> int:
    """Run the job to its end; returns the exit code of DESIGN §7. Raises UsageError."""
    if not args.module and not Path(args.script).is_file():
        raise UsageError(f"run: {args.script} is not a file; give the training script, or -m MODULE")
    if args.coordinator and not args.secret:
        raise UsageError("run: --coordinator needs --secret FILE, the same on all nodes")
    least, most = _nnodes(args.nnodes)
    if most > 1 and not args.coordinator:
        raise UsageError(f"run: --nnodes {args.nnodes} needs --coordinator HOST:PORT and --secret FILE")
    run_dir = (
        args.run_dir or Path("perdure-runs") / f"{Path(args.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    terminal = Terminal()
    launch = Launch(args, run_dir.absolute(), least, terminal)
    try:
        return asyncio.run(launch.run())
    finally:
        terminal.close()


@dataclass
class Launch:
    """One run of the launcher."""

    args: argparse.Namespace
    run_dir: Path
    min_nodes: int
    terminal: Terminal

    async def run(self) -> int:
        """Coordinator (if ours), agent, report."""
        args = self.args
        secret = read_or_make_secret(args.secret) if args.secret else new_secret()
        host, port = address(args.coordinator) if args.coordinator else ("127.0.0.1", 0)
        node = node_name(os.getpid())
        bound = _try_bind(host, port)
        if bound is not None:
            return await self._serve(bound, secret, node)
        self.terminal.say(f"joining the job at {host}:{port}")
        return await self._agent(node, host, port, secret)

    async def _serve(self, bound: socket.socket, secret: bytes, node: str) -> int:
        args = self.args
        store = shelf.Shelf(self.run_dir / "checkpoints")
        if args.fresh:
            _forget(self.run_dir, store)
        files = RunDir(self.run_dir, self.run_dir.name)
        script = (*(("-m",) if args.module else ()), args.script, *args.args)
        resumed = files.job.incarnation > 0
        kept = files.begin(script)
        settings = Settings(
            job=self.run_dir.name,
            incarnation=kept.incarnation,
            home_node=node,
            min_nodes=self.min_nodes,
            max_failures=args.max_failures,
            checkpoint_every=args.checkpoint_every,
            digest_every=args.digest_every,
            log_samples=args.log_samples,
            blocks=kept.blocks,
            first_worker=kept.next_worker,
            last_step=files.last_step,
            digests=files.digests,
            checkpoints=tuple(str(path) for path in store.newest_first()),
            checkpoint_dir=str(store.directory),
        )
        job = Job(settings)
        ports = Ports(store, shelf.publish_save, self.terminal.say, self.terminal.record)
        server = Server(job, secret, files, ports)
        host, port = await server.start_on(bound)
        self._write_access(host, port, secret)
        files.event("run_started", {"incarnation": kept.incarnation, "resumed": resumed, "script": script})
        self.terminal.say(f"run directory {os.path.relpath(self.run_dir)}")
        try:
            return await self._agent(node, host, port, secret)
        finally:
            await server.close()
            files.close()
            with contextlib.suppress(OSError):
                (self.run_dir / ACCESS).unlink()
            self._report()

    async def _agent(self, node: str, host: str, port: int, secret: bytes) -> int:
        args = self.args
        config = AgentConfig(
            node=node,
            host=_reachable(host),
            target=Target(host=host, port=port, secret=secret),
            run_dir=self.run_dir,
            script=(*(("-m",) if args.module else ()), args.script, *args.args),
            workers=args.nproc_per_node,
            standby=args.standby,
        )
        agent = Agent(config, self.terminal.show)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, agent.ask, signum)
        ended = await agent.run()
        if ended.message:
            for line in ended.message.splitlines():
                self.terminal.show(line, True)
        return ended.exit_code

    def _write_access(self, host: str, port: int, secret: bytes) -> None:
        path = self.run_dir / ACCESS
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(Access(host, port, secret.hex(), os.getpid())))

    def _report(self) -> None:
        report = write_report(self.run_dir)
        faults = len(report.faults)
        text = f"{report.committed_steps} steps committed"
        if faults:
            text += (
                f", {faults} fault{'s' * (faults != 1)}; see: perdure report {os.path.relpath(self.run_dir)}"
            )
        self.terminal.say(text)


def node_name(launcher_pid: int) -> str:
    """What the node of a launcher on this machine is called."""
    return f"{socket.gethostname()}-{launcher_pid}"


def _try_bind(host: str, port: int) -> socket.socket | None:
    """A listening socket, or None if another process (or machine) has the address."""
    try:
        family, kind, proto, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--coordinator: {host} cannot be resolved ({error.strerror})") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise UsageError(f"--coordinator: {host}:{port} cannot be bound ({error.strerror})") from error
    return sock


def _reachable(host: str) -> str:
    """The address of this machine that a peer which uses that coordinator reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _forget(run_dir: Path, store: shelf.Shelf) -> None:
    store.clear()
    for name in ("job.json", "metrics.jsonl", "samples.jsonl", "events.jsonl", "report.json"):
        (run_dir / name).unlink(missing_ok=True)


def _nnodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"run: --nnodes {text!r}: expected MIN or MIN:MAX with 1 ≤ MIN ≤ MAX")
    return least, most


def _count(option: str, least: int):  # type: ignore[no-untyped-def]
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise UsageError(f"run: {option} {text!r}: expected an integer ≥ {least}")
        return value

    return parse

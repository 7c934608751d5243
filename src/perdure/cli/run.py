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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from perdure.agent.agent import Agent, AgentConfig
from perdure.agent.link import Target
from perdure.agent.secret import new_secret, read_or_make_secret
from perdure.cli.access import ACCESS, Access, rows_of
from perdure.cli.script import check_script
from perdure.cli.terminal import Terminal, shown
from perdure.coordinator import rundir
from perdure.coordinator.rundir import RunDir
from perdure.coordinator.server import Ports, Server, address
from perdure.core.job import Job, Settings
from perdure.report import write_report
from perdure.schema.errors import UsageError, WireError
from perdure.state import shelf

EXAMPLES = """\
examples:
  perdure run --nproc-per-node 4 train.py --steps 1000
  perdure run --nproc-per-node 4 --run-dir runs/a train.py      again: goes on where it was
  perdure run --nproc-per-node 8 --nnodes 2 --coordinator node-1:9000 --secret FILE train.py     on each node

exit codes: 0 done; 1 the script's error; 3 too many failures; 4 wrong usage; 5 no state could be restored;
129, 130, 143 ended by SIGHUP, SIGINT, SIGTERM with the state saved
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure run`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="run a module instead of a script")
    add("script", metavar="SCRIPT", help="the training script (with -m: the module)")
    rest = add("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    rest.required = False  # argparse would list it among what is missing
    add = parser.add_argument_group("workers").add_argument
    count = _count("--nproc-per-node", 1)
    add("--nproc-per-node", type=count, default=1, metavar="N", help="workers on this node (default: 1)")
    count = _count("--standby", 0)
    add("--standby", type=count, default=0, metavar="K", help="workers that wait to be needed (default: 0)")
    count = _count("--max-failures", 0)
    help_text = "end with exit code 3 after more than this (default: 1000)"
    add("--max-failures", type=count, default=1000, metavar="N", help=help_text)
    add("--policy", choices=["perdure"], default="perdure", help="the recovery policy")
    add = parser.add_argument_group("several nodes").add_argument
    add("--nnodes", default="1", metavar="MIN[:MAX]", help="nodes to start with, and to grow to (default: 1)")
    add("--coordinator", metavar="HOST:PORT", help="where the nodes meet; the first that can bind it serves")
    add(
        "--secret", type=Path, metavar="FILE", help="the nodes' shared secret; made, for its owner, if absent"
    )
    add = parser.add_argument_group("what is kept").add_argument
    help_text = "where all of it goes; given again, the run goes on (default: perdure-runs/SCRIPT-TIME)"
    add("--run-dir", type=_directory, metavar="DIR", help=help_text)
    add("--fresh", action="store_true", help="forget what is in the run directory and start anew")
    count = _count("--checkpoint-every", 0)
    help_text = "steps between checkpoints; 0: none at all (default: one a minute)"
    add("--checkpoint-every", type=count, metavar="N", help=help_text)
    count = _count("--digest-every", 1)
    help_text = "steps between digests of the state (default: 1)"
    add("--digest-every", type=count, default=1, metavar="N", help=help_text)
    add("--log-samples", action="store_true", help="write samples.jsonl: who computed which samples")


def run(args: argparse.Namespace) -> int:
    """Run the job to its end; returns the exit code of DESIGN §7. Raises UsageError."""
    check_script(args.script, args.module)
    if args.coordinator and not args.secret:
        raise UsageError("run: --coordinator needs --secret FILE, the same on all nodes")
    least, most = _nnodes(args.nnodes)
    if most > 1 and not args.coordinator:
        raise UsageError(f"run: --nnodes {args.nnodes} needs --coordinator HOST:PORT and --secret FILE")
    run_dir = (
        args.run_dir or Path("perdure-runs") / f"{Path(args.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    terminal = Terminal()
    launch = Launch(args, run_dir.absolute(), least, most, terminal)
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
    max_nodes: int
    terminal: Terminal
    began_s: float = field(default_factory=time.time)

    async def run(self) -> int:
        """Coordinator (if ours), agent, report."""
        args = self.args
        secret = read_or_make_secret(args.secret) if args.secret else new_secret()
        host, port = address(args.coordinator) if args.coordinator else ("127.0.0.1", 0)
        rundir.make(self.run_dir)
        node = node_name(os.getpid())
        bound = _try_bind(host, port)
        if bound is not None:
            with bound, rundir.lock(self.run_dir):
                return await self._serve(bound, secret, node)
        self.terminal.say(self._joining(host, port, secret))
        return await self._agent(node, host, port, secret)

    def _joining(self, host: str, port: int, secret: bytes) -> str:
        """What this launcher is about to do. Raises UsageError for --fresh if the job is training already."""
        what = f"joining the job at {host}:{port}"
        try:
            rows = rows_of(host, port, secret)
        except (OSError, WireError):
            return what  # the agent tries on, and says what is wrong
        training = sum(row.state == "active" for row in rows)
        if not training:
            return what
        if self.args.fresh:
            raise UsageError(
                f"run: --fresh: the job at {host}:{port} is training already; leave --fresh out to join it, "
                "or end it first"
            )
        busy = f"{training} worker{' is' if training == 1 else 's are'} training"
        return f"{what}: {busy}, this node brings {self.args.nproc_per_node} more"

    async def _serve(self, bound: socket.socket, secret: bytes, node: str) -> int:
        args = self.args
        store = shelf.Shelf(self.run_dir / "checkpoints")
        try:
            if args.fresh:
                _forget(self.run_dir, store)
            store.sweep()
            files = RunDir(self.run_dir, self.run_dir.name, self.terminal.say)
            resumed, cut_off = files.job.incarnation > 0, files.cut_off
            script = self._script()
            kept = files.begin(script)
            here, at = bound.getsockname()[:2]
            self._write_access(here, at, secret)
        except OSError as error:
            raise rundir.unusable(self.run_dir, error) from error
        checkpoints = tuple(str(path) for path in store.newest_first())
        settings = Settings(
            job=self.run_dir.name,
            key=kept.key,
            incarnation=kept.incarnation,
            home_node=node,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            max_failures=args.max_failures,
            checkpoint_every=args.checkpoint_every,
            digest_every=args.digest_every,
            log_samples=args.log_samples,
            blocks=kept.blocks,
            first_worker=kept.next_worker,
            given_up=kept.given_up,
            last_step=files.last_step,
            cut_off=cut_off,
            digests=files.digests,
            checkpoints=checkpoints,
            checkpoint_dir=str(store.directory),
        )
        job = Job(settings)
        ports = Ports(store, shelf.publish_save, self.terminal.say, self.terminal.record)
        server = Server(job, secret, files, ports)
        host, port = await server.start_on(bound)
        files.event("run_started", {"incarnation": kept.incarnation, "resumed": resumed, "script": script})
        self.terminal.say(f"run directory {shown(self.run_dir)}")
        if files.digests and not checkpoints:
            self.terminal.say(self._anew(len(files.digests)))
        try:
            return await self._agent(node, host, port, secret)
        finally:
            await server.close()
            files.close()
            with contextlib.suppress(OSError):
                (self.run_dir / ACCESS).unlink()
            if not files.gone:
                self._report()

    def _script(self) -> tuple[str, ...]:
        args = self.args
        return (*(("-m",) if args.module else ()), args.script, *args.args)

    def _anew(self, steps: int) -> str:
        """What is said of a run directory that has steps and no state to go on from."""
        alone = self.max_nodes == 1
        return (
            f"{rundir.METRICS} has {steps} step{'s' * (steps != 1)} of an earlier run, but there is no "
            f"checkpoint: training begins anew{'' if alone else ' unless another node has the state'}; steps "
            "that come again keep the lines they have; --fresh clears them"
        )

    async def _agent(self, node: str, host: str, port: int, secret: bytes) -> int:
        args = self.args
        config = AgentConfig(
            node=node,
            host=_reachable(host),
            target=Target(host=host, port=port, secret=secret),
            run_dir=self.run_dir,
            script=self._script(),
            workers=args.nproc_per_node,
            standby=args.standby,
        )
        agent = Agent(config, self.terminal.show)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(signum, agent.ask, signum)
        ended = await agent.run()
        if ended.message:
            lines = ended.message.splitlines()
            own = (
                "" if len(lines) > 1 or lines[0].startswith("perdure: ") else "perdure: "
            )  # else a traceback
            for line in lines:
                self.terminal.show(own + line, True)
        return ended.exit_code

    def _write_access(self, host: str, port: int, secret: bytes) -> None:
        path = self.run_dir / ACCESS
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(Access(host, port, secret.hex(), os.getpid())))

    def _report(self) -> None:
        try:
            report = write_report(self.run_dir)
        except OSError as error:
            self.terminal.say(f"the report could not be written: {error.strerror} ({error.filename})")
            return
        said = []
        if report.committed_steps:
            said.append(f"{report.committed_steps} step{'s' * (report.committed_steps != 1)} committed")
        count = sum(fault.time >= self.began_s for fault in report.fault_times)
        if count:  # of this run; the report has those of earlier runs in this directory too
            said.append(f"{count} fault{'s' * (count != 1)}; see: perdure report {shown(self.run_dir)}")
        if said:
            self.terminal.say(", ".join(said))


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
    for path in (run_dir / "logs").glob("worker-*"):  # numbers of workers begin at 0 again
        path.unlink(missing_ok=True)


def _directory(text: str) -> Path:
    if not text:
        raise UsageError("run: --run-dir is empty: expected the name of a directory")
    return Path(text)


def _nnodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"run: --nnodes {text!r}: expected MIN or MIN:MAX with 1 ≤ MIN ≤ MAX")
    return least, most


def _count(option: str, least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise UsageError(f"run: {option} {text!r}: expected an integer ≥ {least}")
        return value

    return parse

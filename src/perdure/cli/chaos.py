"""`perdure chaos`: hits workers of a running job at random, says what it did, and judges what came of it.

Only workers on this machine are hit, and never the last active one. Exit codes: 0 the job stood it, 1 it
did not, 3 the run ended before all faults struck.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import msgspec

from perdure.agent import procfs
from perdure.chaos.campaign import Campaign
from perdure.chaos.faults import SIGNALS, Manner
from perdure.chaos.injector import Injector
from perdure.chaos.verdict import Outcome, endured
from perdure.cli.ps import ask
from perdure.cli.run import node_name
from perdure.schema.errors import UsageError
from perdure.schema.messages import PsRow

GO_ON_S: Final = 120.0
_LOOK_S: Final = 0.1
_EXIT: Final = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.UNKNOWN: 3}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure chaos`."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run that is going on")
    add("--kills", type=_number(int, 1), default=5, metavar="N", help="how many faults (default 5)")
    add("--seed", type=_number(int, 0), default=0, metavar="S", help="of the choice of times and workers")
    add(
        "--manner",
        type=_manner,
        default=Manner.KILL,
        metavar="|".join(SIGNALS),
        help="which signal; term asks to leave, what is stopped goes on at the next fault (default kill)",
    )
    add(
        "--every",
        type=_number(float, 0.0),
        default=5.0,
        metavar="SECONDS",
        help="mean time between two faults (default 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Strike and judge. Raises UsageError when no run is going on there."""
    campaign = Campaign(args.seed, args.every, lasting=args.manner is not Manner.STOP)
    struck, before = 0, -1
    waits = False
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _leave)
    rows: tuple[PsRow, ...] | None = ask(args.run_dir, "chaos")
    with Injector() as injector:
        while rows is not None and struck < args.kills:
            time.sleep(campaign.pause_s())
            rows = _rows(args.run_dir)
            row = campaign.choose([row for row in rows if _is_here(row)]) if rows else None
            if row is None or row.pid is None:
                if rows and not waits:
                    print("nobody can be spared just now: waiting for more active workers here", flush=True)
                waits = True
                continue
            waits = False
            before = _last_step(args.run_dir)
            if injector.strike(row.pid, args.manner):
                struck += 1
                where = f"{row.state}, step {row.step}, {row.phase}"
                print(f"{args.manner}: worker {row.id}, pid {row.pid} ({where})", flush=True)
    deadline = time.monotonic() + GO_ON_S
    while _last_step(args.run_dir) <= before and _rows(args.run_dir) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    exit_code = None if _rows(args.run_dir) is not None else _exit_code(args.run_dir)
    verdict = endured(args.kills, struck, before, _last_step(args.run_dir), exit_code)
    print(verdict, flush=True)
    return _EXIT[verdict.outcome]


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """End as by an error, so that what is stopped goes on."""
    raise SystemExit(128 + signum)


def _rows(run_dir: Path) -> tuple[PsRow, ...] | None:
    """The workers; None once the run has ended."""
    try:
        return ask(run_dir)
    except UsageError:
        return None


def _is_here(row: PsRow) -> bool:
    """Whether the number is that of a child of the row's launcher on this machine, and of nobody else."""
    found = procfs.process(row.pid) if row.pid is not None else None
    return found is not None and row.node == node_name(found.parent)


class _Line(msgspec.Struct):
    event: str = ""
    step: int | None = None
    exit_code: int | None = None


def _lines(path: Path) -> list[_Line]:
    """The whole lines of a file that is being written; without those that cannot be read."""
    data = path.read_bytes() if path.exists() else b""
    found = []
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=_Line))
    return found


def _last_step(run_dir: Path) -> int:
    steps = [line.step for line in _lines(run_dir / "metrics.jsonl")[-1:]]
    return steps[0] if steps and steps[0] is not None else -1


def _exit_code(run_dir: Path) -> int | None:
    """How the newest run in events.jsonl ended; 1 if it does not say, as its launcher died then."""
    code: int | None = 1
    for line in _lines(run_dir / "events.jsonl"):
        if line.event == "run_started":
            code = 1
        elif line.event == "run_ended":
            code = line.exit_code
    return code


def _manner(text: str) -> Manner:
    if text not in SIGNALS:
        raise UsageError(f"chaos: --manner {text!r}: expected {', '.join(SIGNALS)}")
    return Manner(text)


def _number(kind: Callable[[str], int | float], least: float) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not least <= value < float("inf"):
            raise UsageError(f"chaos: {text!r}: expected a number ≥ {least:g}")
        return value

    return parse

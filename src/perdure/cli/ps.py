"""`perdure ps`: the workers of a running job, asked of its coordinator."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from perdure.cli.access import ACCESS, Access, rows_of
from perdure.coordinator.rundir import JOB
from perdure.schema.errors import UsageError, WireError
from perdure.schema.messages import PsRow


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure ps`."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run that is going on"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def run(args: argparse.Namespace) -> int:
    """Print one row a worker. Raises UsageError when no run is going on there."""
    rows = ask(args.run_dir)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    table = Table("id", "node", "pid", "state", "generation", "step", "phase", "micro-batch", box=None)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in msgspec.structs.astuple(row)))
    Console().print(table)
    return 0


def ask(run_dir: Path, command: str = "ps") -> tuple[PsRow, ...]:
    """The rows of a running job, for a command of that name. Raises UsageError."""
    if not run_dir.is_dir():
        raise UsageError(f"{command}: {run_dir} is not a directory; give the RUN_DIR of a `perdure run`")
    try:
        access = msgspec.json.decode((run_dir / ACCESS).read_bytes(), type=Access)
        return rows_of(access.host, access.port, bytes.fromhex(access.secret))
    except FileNotFoundError:
        advice = f"start it with `perdure run --run-dir {run_dir} …`"
        if (run_dir / "logs").is_dir() and not (run_dir / JOB).exists():
            advice = "of a job on several nodes ask in the RUN_DIR of the launcher that others connect to"
        raise UsageError(f"{command}: no run is going on in {run_dir}; {advice}") from None
    except (OSError, WireError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{command}: the run in {run_dir} does not answer ({error}); is its launcher still there?"
        ) from error

"""`perdure demo`: the example GPT twice, once undisturbed, once with three of four workers killed.

1. `examples/train_gpt.py` is trained by `perdure run` with four workers, in DIR/undisturbed.
2. The same once more in DIR/disturbed; this process watches it and sends SIGKILL at three moments: while a
   worker computes, while the replacement takes its state, in a worker's optimizer step.
3. Both runs' digests are compared, step by step: exit code 0 only if all are equal.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from perdure.cli.demo_kills import Hunter, Strike
from perdure.cli.demo_view import Narrator, View
from perdure.cli.spectator import Spectator, Tail, digests, last_lines
from perdure.cli.terminal import shown
from perdure.report import Report, build_report
from perdure.schema.errors import PerdureError, UsageError
from perdure.schema.progress import Phase

WORKERS = 4
PLAIN, KILLED = "undisturbed", "disturbed"
ROWS_EVERY_S = 0.2
LOOK_EVERY_S = 0.001
PLAIN_WIDTH = 120
PER_STEP = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `perdure demo`."""
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where both runs go (default: perdure-runs/demo-TIME)"
    )
    # The size of the example, for tests of the demo.
    for name, default in (("steps", 24), ("layers", 4), ("width", 256), ("context", 128), ("micro-batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every digest is equal, 1 when one differs. Raises PerdureError if a run fails."""
    if args.steps < 8:
        raise UsageError(f"demo: --steps {args.steps}: expected at least 8, for three kills")
    script = _example()
    run_dir = args.run_dir or Path("perdure-runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    for part in (PLAIN, KILLED):
        if (run_dir / part).exists():
            raise UsageError(f"demo: {run_dir / part} is there already; give another --run-dir")
    command = [str(script), "--eval-every", "0"]
    for name in ("steps", "layers", "width", "context"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--micro-batch", str(args.micro_batch), "--per-step", str(PER_STEP)]
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(
        f"A small GPT learns Python's standard library with {WORKERS} workers: perdure run "
        f"--nproc-per-node {WORKERS} {shown(script)} --steps {args.steps}\n"
    )
    strikes = (
        Strike(since=args.steps // 4, phase=Phase.COMPUTE),
        Strike(since=0, phase=Phase.HEAL, newcomer=True),
        Strike(since=args.steps * 5 // 8, phase=Phase.COMMIT),
    )
    _part(console, "1  Undisturbed", Spectator(run_dir / PLAIN, _options(), command), args.steps, ())
    title = "2  The same, and three of the four workers are killed"
    struck = _part(console, title, Spectator(run_dir / KILLED, _options(), command), args.steps, strikes)
    return compare(console, run_dir, struck, args.steps)


def _options() -> list[str]:
    return ["--nproc-per-node", str(WORKERS), "--checkpoint-every", "0"]


def _example() -> Path:
    """The example's script: in the checkout that this package is run from, else where it was installed."""
    checkout = Path(__file__).resolve().parents[3] / "examples"
    installed = Path(sysconfig.get_path("data")) / "share" / "perdure" / "examples"
    for folder in (checkout, installed):
        if (folder / "train_gpt.py").is_file():
            return folder / "train_gpt.py"
    raise UsageError(f"demo: train_gpt.py is neither in {checkout} nor in {installed}; install perdure again")


def _part(console: Console, title: str, spectator: Spectator, steps: int, strikes: Sequence[Strike]) -> int:
    """One run, shown while it goes on; returns how many workers were killed."""
    struck = 0
    with View(console, title, steps) as view, spectator:
        hunter = Hunter(spectator, strikes, WORKERS)
        narrator = Narrator(view)
        looked_at = 0.0
        while (exit_code := spectator.ended()) is None:
            hit = hunter.look()
            if hit is not None:
                struck += 1
                narrator.struck(hit, struck)
            if time.monotonic() - looked_at >= ROWS_EVERY_S:
                view.workers(spectator.rows())
                looked_at = time.monotonic()
            _tell(spectator, hunter, narrator, view)
            time.sleep(LOOK_EVERY_S if strikes and not hunter.done else ROWS_EVERY_S / 4)
        _tell(spectator, hunter, narrator, view)
    if exit_code != 0:
        what = f"demo: the run ended with exit code {exit_code}; all that it printed is in {spectator.output}"
        raise PerdureError(f"{what}\n{last_lines(spectator.output, 20)}")
    console.print()
    return struck


def _tell(spectator: Spectator, hunter: Hunter, narrator: Narrator, view: View) -> None:
    for event in spectator.events.read():
        if event["event"] == "worker_started":
            hunter.workers[event["worker"]] = event["pid"]
        narrator.event(event)
    for line in spectator.metrics.read():
        view.committed(line)


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Cost:
    """What the kills cost, read from what the run wrote."""

    report: Report
    lost: int
    seconds: float


def _cost(run_dir: Path) -> _Cost:
    """Committed steps that were lost: those above the step from which a new generation went on."""
    lines = Tail(run_dir / "metrics.jsonl").read()
    lost = 0
    for event in Tail(run_dir / "events.jsonl").read():
        if event["event"] == "generation_opened" and event["lost"]:
            committed = [line["step"] for line in lines if line["time"] < event["wall_s"]]
            lost += sum(step > event["base"] for step in committed)
    return _Cost(build_report(run_dir), lost, lines[-1]["time"] - lines[0]["time"])


def compare(console: Console, run_dir: Path, struck: int, steps: int) -> int:
    """The two runs beside each other."""
    plain, killed = _cost(run_dir / PLAIN), _cost(run_dir / KILLED)
    expected, found = digests(run_dir / PLAIN), digests(run_dir / KILLED)
    different = [step for step in range(steps) if expected.get(step) != found.get(step)]
    faults = [fault for fault in killed.report.faults if fault.kind == "signal"]
    stalls = ", ".join(f"{max(fault.stall_s, 0.0):.2f} s" for fault in faults if fault.stall_s is not None)
    table = Table("", PLAIN, f"{struck} killed", box=None, padding=(0, 2), header_style="bold")
    table.add_row("steps committed", str(plain.report.committed_steps), str(killed.report.committed_steps))
    table.add_row("committed steps lost", str(plain.lost), str(killed.lost))
    recomputed = sum(fault.recomputed_micro_batches for fault in faults)
    table.add_row("micro-batches recomputed", "0", f"{recomputed} of {steps * PER_STEP}")
    table.add_row("a step takes (median)", *(f"{c.report.step_s_median or 0:.2f} s" for c in (plain, killed)))
    table.add_row("stall of each kill", "", stalls)
    table.add_row("first to last commit", f"{plain.seconds:.1f} s", f"{killed.seconds:.1f} s")
    table.add_row("digest of the last state", *(d.get(steps - 1, "")[:16] for d in (expected, found)))
    console.print(table)
    console.print()
    if different:
        console.print(
            f"the digests of {len(different)} steps differ, first of step {different[0]}", style="red"
        )
        return 1
    if struck < 3:
        console.print(f"only {struck} of 3 workers could be killed: the run was over too soon", style="red")
        return 1
    console.print(
        f"The digests of all {steps} steps are equal: not a bit depends on the kills.", style="bold green"
    )
    where = shown(run_dir / KILLED)
    console.print(f"Both runs are in {shown(run_dir)}; see: perdure report {where}")
    return 0

"""Trains a task of `edge_tasks.py` (or `tasks.py`) with whatever of the API a test wants to see used.

    perdure run … tests/edge_script.py TASK --notes DIR [--steps N] [--kill STEP:MICRO_BATCH] …

The notes are those of `train_task.py`. Whatever strikes here strikes once, in whichever worker comes first.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import edge_tasks
import perdure
import tasks
from edge_tasks import Losses
from perdure.worker import heal
from reference import state_digest
from train_task import Diary

KEPT: list[Any] = []
"""What lives until the interpreter ends."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--no-exact", action="store_true")
    parser.add_argument("--pace-ms", type=float, default=0, help="added to each micro-batch")
    parser.add_argument("--unprotected", action="store_true", help="a counter that nobody heals")
    parser.add_argument("--kill", default="", metavar="STEP:MICRO_BATCH", help="SIGKILL before its backward")
    parser.add_argument("--flip", type=int, default=-1, metavar="STEP", help="a bit of the first donor")
    parser.add_argument("--raise", dest="raises", default="", metavar="STEP", help="in its commit")
    parser.add_argument("--break", dest="breaks", type=int, default=-1, metavar="STEP", help="after it")
    parser.add_argument("--hold", choices=["", "name", "around"], default="", help="what is kept of the loop")
    parser.add_argument("--evaluate", action="store_true", help="after each step")
    parser.add_argument("--print-values", action="store_true", help="losses, evaluations, peak memory")
    parser.add_argument("--kill-evaluation", type=int, default=-1, metavar="SAMPLE", help="when it comes")
    parser.add_argument("--save", type=Path, help="job.save after each step")
    parser.add_argument("--kill-save", type=int, default=-1, metavar="STEP", help="while writing")
    parser.add_argument(
        "--tail", choices=["", "raise", "kill", "exit", "leave"], default="", help="how it ends, once"
    )
    return parser.parse_args()


def strike(notes: Path, name: str) -> bool:
    """Whether this process is the one that `name` strikes."""
    try:
        (notes / f"{name}.struck").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def kill(notes: Path, name: str) -> None:
    if strike(notes, name):
        os.kill(os.getpid(), signal.SIGKILL)


def train(args: argparse.Namespace) -> None:
    task = (edge_tasks.TASKS | tasks.TASKS)[args.task]
    job = perdure.join(seed=0, exact=not args.no_exact)
    parts = task.build(0)
    job.protect(**parts.protected)
    batches = perdure.MicroBatches(
        parts.dataset, task.batch_size, task.per_step, blocks=args.blocks, num_workers=args.num_workers,
        drop_last=task.drop_last,
    )  # fmt: skip
    validation = perdure.MicroBatches(
        tasks.Numbers(30, noise=True), 4, 2, shuffle=False, drop_last=False, num_workers=args.num_workers
    )
    notes = Diary(args.notes / f"{os.getpid()}.digests")
    shares = Diary(args.notes / f"{os.getpid()}.micro-batches")

    def judge(batch: Any) -> tuple[dict[str, float], int]:
        if args.kill_evaluation in batch[2]:
            kill(args.notes, "evaluation")
        parts.protected["model"].eval()  # and not back; not every worker is dealt a batch
        loss, _ = parts.loss(batch)
        return {"error": float(loss), "drawn": float(torch.rand(()))}, len(batch[0])

    _flip_when_asked(args, next(parts.protected["model"].parameters()))
    counter = 0
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for step in _held(job.steps(batches, until=args.steps), args.hold):
        for batch in step:
            time.sleep(args.pace_ms / 1000)  # stands for computing: a replacement needs steps to join in
            shares.write(step.index, step.micro_batch, ",".join(map(str, step.sample_ids)))
            loss, weight = parts.loss(batch)
            if args.kill == f"{step.index}:{step.micro_batch}":
                kill(args.notes, "backward")
            if isinstance(loss, Losses):
                for one in loss.each:
                    step.backward(one)
            elif loss is None:
                step.skip()
            else:
                step.backward(loss, weight=weight)
        parts.commit()
        if args.unprotected:
            counter += 1
            _drift(parts.protected["model"], counter)
        if args.raises == str(step.index) and strike(args.notes, "commit"):
            raise ValueError("once, in the commit")
        step.log(pid=os.getpid(), rate=torch.tensor(0.5))
        if args.print_values:
            print("loss", step.loss)
        if args.evaluate:
            values = job.evaluate(judge, validation)
            step.log(**values)
            if args.print_values:
                print("values", *values.values())
        if args.save:
            if args.kill_save == step.index:
                _kill_while_writing(args.notes)
            job.save(args.save)
        notes.write(step.index, state_digest(parts.protected))
        if args.breaks == step.index:
            break
    if args.print_values:
        print("grew", memory("VmHWM") - before)
    print(f"tail of {os.getpid()}, leader {job.leader}", flush=True)
    _end(args)


def _held(loop: Iterator[Any], hold: str) -> Iterator[Any]:
    if hold:
        KEPT.append(loop if hold == "name" else (step for step in loop))
        loop = KEPT[-1]
    return loop


def _end(args: argparse.Namespace) -> None:
    if args.tail == "leave":
        sys.exit(0)
    if args.tail and strike(args.notes, "tail"):
        if args.tail == "raise":
            raise RuntimeError("in the tail")
        if args.tail == "exit":
            sys.exit(9)
        os.kill(os.getpid(), signal.SIGKILL)


def _flip_when_asked(args: argparse.Namespace, parameter: torch.Tensor) -> None:
    """Memory that goes wrong after the commit that is to be given away."""
    if args.flip < 0:
        return
    answer = heal.Desk._answer

    def flipped(desk: heal.Desk, ask: heal.Ask) -> Any:
        answered = answer(desk, ask)
        if ask.step >= args.flip and strike(args.notes, "flip"):
            parameter.detach().view(-1).view(torch.uint8).numpy()[0] ^= 1  # behind torch's back
        return answered

    heal.Desk._answer = flipped  # type: ignore[method-assign]


@torch.no_grad()
def _drift(model: torch.nn.Module, counter: int) -> None:
    for parameter in model.parameters():
        parameter.add_(1e-3 * counter)


def _kill_while_writing(notes: Path) -> None:
    """The next time that this process flushes a file of a checkpoint, it may be its last."""
    flush = os.fsync

    def fsync(fd: int) -> None:
        kill(notes, "save")
        flush(fd)

    os.fsync = fsync


if __name__ == "__main__":
    train(parse_args())

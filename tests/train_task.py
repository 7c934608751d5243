"""Trains a task of `tasks.py` under perdure and says what it did: the subject of the integration tests.

    perdure run --nproc-per-node 4 tests/train_task.py mlp --steps 6 --digests DIR

Each worker process appends to files of its own in DIR, whole lines at a time:

    PID.digests         step sha256             after each commit: the judge's digest of the state
    PID.micro-batches   step micro_batch ids    before each micro-batch: ids are comma-separated
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import perdure
from reference import state_digest
from tasks import TASKS


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one of the test tasks.")
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--digests", type=Path, required=True, metavar="DIR")
    parser.add_argument("--compute-ms", type=float, default=0, help="added to each micro-batch")
    parser.add_argument("--commit-ms", type=float, default=0, help="added to each commit")
    parser.add_argument("--no-exact", action="store_true", help="join(exact=False)")
    return parser.parse_args()


class Diary:
    """One file; a line is one write to the kernel, so that a SIGKILL never leaves half of one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    args = parse_args()
    task = TASKS[args.task]
    job = perdure.join(seed=args.seed, exact=not args.no_exact)
    parts = task.build(args.seed)
    job.protect(**parts.protected)
    batches = perdure.MicroBatches(
        parts.dataset,
        batch_size=task.batch_size,
        per_step=task.per_step,
        blocks=args.blocks,
        num_workers=args.num_workers,
    )
    digests = Diary(args.digests / f"{os.getpid()}.digests")
    micro_batches = Diary(args.digests / f"{os.getpid()}.micro-batches")
    for step in job.steps(batches, until=args.steps):
        for batch in step:
            micro_batches.write(step.index, step.micro_batch, ",".join(map(str, step.sample_ids)))
            time.sleep(args.compute_ms / 1000)
            loss, weight = parts.loss(batch)
            if loss is None:
                step.skip()
            else:
                step.backward(loss, weight=weight)
        parts.commit()
        time.sleep(args.commit_ms / 1000)
        digests.write(step.index, state_digest(parts.protected))


if __name__ == "__main__":
    main()

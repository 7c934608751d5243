"""DDP's arm under torchrun: gradients summed once a step, under the last micro-batch's backward.

With --checkpoint DIR it saves every --every steps and goes on from there when torchrun starts it again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diary import Diary
from gate import Gate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import Parts, build, parser


def arguments() -> argparse.Namespace:
    add = parser("Train under DDP.")
    add.add_argument("--bucket-view", action="store_true", help="gradient_as_bucket_view=True")
    add.add_argument("--keep-buckets", action="store_true", help="find_unused_parameters=True")
    add.add_argument("--checkpoint", type=Path, metavar="FILE")
    add.add_argument("--every", type=int, default=5, metavar="STEPS")
    return add.parse_args()


def batches(parts: Parts, micro_batch: int) -> Iterator[list[torch.Tensor]]:
    """This rank's batches, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(parts.data, drop_last=True)
    loader = DataLoader(parts.data, batch_size=micro_batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    args = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    parts = build(args)
    first = restore(parts, args.checkpoint) if args.checkpoint else 0
    model = DistributedDataParallel(
        parts.model, gradient_as_bucket_view=args.bucket_view, find_unused_parameters=args.keep_buckets
    )
    gate = Gate(args.gate, "ddp", args.segment) if args.gate else None
    diary = Diary(args.diary) if args.diary else None
    data = batches(parts, args.micro_batch)
    share = args.per_step // dist.get_world_size()
    for step in range(first, args.steps):
        total = 0.0
        for index in range(share):
            last = index == share - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = parts.loss(model, next(data))
                total += loss.item()
                (loss / share).backward()
        parts.update()
        if diary:
            diary.committed(step)
        if args.checkpoint and (step + 1) % args.every == 0 and dist.get_rank() == 0:
            save(parts, args.checkpoint, step)
        if gate:
            gate.passed(step)
    dist.destroy_process_group()


def save(parts: Parts, path: Path, step: int) -> None:
    """Write aside, then rename."""
    aside = path.with_suffix(".partial")
    torch.save({"step": step, **{name: thing.state_dict() for name, thing in stateful(parts).items()}}, aside)
    aside.replace(path)


def restore(parts: Parts, path: Path) -> int:
    """Load the checkpoint, if there is one; the step to go on with."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, thing in stateful(parts).items():
        thing.load_state_dict(saved[name])
    return int(saved["step"]) + 1


def stateful(parts: Parts) -> dict[str, Any]:
    return {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler}


if __name__ == "__main__":
    main()

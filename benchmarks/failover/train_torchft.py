"""torchft's arm: one process a replica group, gloo, its own DDP, patched so that survivors live on.

As shipped, torchft 0.2.0's DistributedDataParallel asserts on a future that was never set when an all-reduce
fails, which kills every survivor. Here that bucket's future is completed, and the step is then discarded by
`should_commit`, as torchft means it.
"""

# No postponed annotations: torch checks those of the communication hook.

import argparse
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from diary import Diary
from torch.utils.data import DataLoader, DistributedSampler
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from workload import Parts, build, parser


class PatchedDataParallel(DistributedDataParallel):
    """Goes on when an all-reduce failed."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        inner = getattr(work.get_future(), "_fut", None)
        if inner is None:
            inner = torch.futures.Future()
            inner.set_result(bucket.buffer())
        return inner


def arguments() -> argparse.Namespace:
    add = parser("Train under torchft.")
    add.add_argument("--replica", type=int, required=True)
    add.add_argument("--replicas", type=int, required=True)
    add.add_argument("--lighthouse", required=True, metavar="URL")
    add.add_argument("--timeout-s", type=float, required=True, help="torchft's timeout of operations")
    add.add_argument("--quorum-s", type=float, required=True, help="torchft's quorum_timeout")
    return add.parse_args()


def batches(parts: Parts, args: argparse.Namespace) -> Iterator[list[torch.Tensor]]:
    """This replica's batches, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        parts.data, num_replicas=args.replicas, rank=args.replica, drop_last=True
    )
    loader = DataLoader(parts.data, batch_size=args.micro_batch, sampler=sampler, drop_last=True)
    while True:
        yield from loader


def main() -> None:
    args = arguments()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    parts = build(args)
    stateful = {"model": parts.model, "optimizer": parts.optimizer, "scheduler": parts.scheduler}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(saved: dict[str, Any]) -> None:
        for name, thing in stateful.items():
            thing.load_state_dict(saved[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {name: thing.state_dict() for name, thing in stateful.items()},
        min_replica_size=2,
        timeout=timedelta(seconds=args.timeout_s),
        quorum_timeout=timedelta(seconds=args.quorum_s),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica_{args.replica}",
        hostname="127.0.0.1",
    )
    model = PatchedDataParallel(manager, parts.model)
    diary, data = Diary(args.diary), batches(parts, args)
    share = args.per_step // args.replicas
    while manager.current_step() < args.steps:
        manager.start_quorum()
        for index in range(share):
            with contextlib.nullcontext() if index == share - 1 else model.no_sync():
                (parts.loss(model, next(data)) / share).backward()
        if manager.should_commit():
            parts.update()
            diary.committed(manager.current_step() - 1)
        else:
            parts.optimizer.zero_grad()
    manager.shutdown()


if __name__ == "__main__":
    main()

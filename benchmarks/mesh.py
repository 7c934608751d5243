"""One reduction of a gradient among workers of one host: perdure's mesh against gloo's all-reduce.

    python benchmarks/mesh.py [--workers 4] [--megabytes 14 40] [--rounds 15] [--json FILE]

Each round runs every arm once, in turn, in the same processes: `pull` (peers read each other's memory),
`tcp` (the same over sockets), `gloo` (all-reduce of one flat tensor, with the copies into and out of it that
DDP's buckets make left out). The time is the slowest worker's; CPU is the sum over the workers. For the mesh
the reduction is whole: slices of separate gradients to the owners, ordered fold, division, results to
everyone, and every own send known to be complete.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from perdure.schema.ids import Generation
from perdure.schema.plan import Address, Span
from perdure.worker.fold import Fold, Scratch
from perdure.worker.gradients import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Buckets,
    Portion,
    Results,
    bytes_of,
)
from perdure.worker.listener import Listener
from perdure.worker.mesh import Mesh
from perdure.worker.transport import LATER, Bulk, Later

LEAF, RESULT = 1, 2
TIMEOUT_S = 60.0


class Reduction:
    """The smallest reducer over one mesh: one leaf a worker, folded in rank order."""

    def __init__(self, rank: int, workers: int, buckets: Buckets) -> None:
        self.rank, self.workers, self.buckets = rank, workers, buckets
        self.results, self.scratch = Results(buckets), Scratch()
        self.done = threading.Event()
        self.mesh: Mesh | None = None
        self.portions: list[Portion] = []
        self.folds: dict[int, Fold] = {}
        self.early: dict[Bulk, torch.Tensor] = {}
        self.whole: list[Bulk] = []
        self.late: list[tuple[int, Bulk]] = []
        self.step = -1

    def run(self, leaf: list[torch.Tensor]) -> None:
        assert self.mesh is not None
        self.done.clear()
        self.mesh.submit(lambda: self._begin(leaf))
        if not self.done.wait(TIMEOUT_S) or not self.mesh.wait_sent(self.step, TIMEOUT_S):
            raise TimeoutError("the reduction did not end")

    def _begin(self, leaf: list[torch.Tensor]) -> None:
        assert self.mesh is not None
        self.step += 1
        self.results.clear()
        order = [[rank] for rank in range(self.workers)]
        for bucket in range(len(self.buckets)):
            lo, hi = self.buckets.shard(bucket, self.rank, self.workers)
            span = Span(bucket, lo, hi)
            self.folds[bucket] = Fold(self.buckets, span, order, self.results, self.scratch)
        self.portions = [self.buckets.portion(bucket, leaf) for bucket in range(len(self.buckets))]
        for bucket, portion in enumerate(self.portions):
            meta = portion.presence.to_bytes(len(portion.members) // 8 + 1, "little")
            for offset in range(1, self.workers):
                peer = (self.rank + offset) % self.workers
                lo, hi = self.buckets.shard(bucket, peer, self.workers)
                header = Bulk(LEAF, self.step, bucket, self.rank, lo, hi, meta)
                self.mesh.post(peer, header, portion.slices(lo, hi))
            self.folds[bucket].contribute(self.rank, portion)
            self._progress(bucket)
        for header in self.whole:
            self._accept(header)
        self.whole.clear()
        self._retake()

    def _accept(self, header: Bulk) -> None:
        presence = int.from_bytes(header.meta, "little")
        self.folds[header.bucket].accept(header.first, presence, self.early.pop(header))
        self._progress(header.bucket)

    def _progress(self, bucket: int) -> None:
        assert self.mesh is not None
        fold = self.folds[bucket]
        if not fold.complete:
            return
        lo, hi = fold.span.lo, fold.span.hi
        presence = fold.finish(float(self.workers))
        meta = presence.to_bytes(len(self.portions[bucket].members) // 8 + 1, "little")
        for offset in range(1, self.workers):
            peer = (self.rank + offset) % self.workers
            header = Bulk(RESULT, self.step, bucket, 0, lo, hi, meta)
            self.mesh.post(peer, header, [self.results.view(bucket, lo, hi)])
        self._check()

    def _check(self) -> None:
        if self.results.complete:
            self.done.set()

    def _retake(self) -> None:
        assert self.mesh is not None
        late, self.late = self.late, []
        for peer, header in late:
            self.mesh.take(peer, header)

    def formed(self) -> None: ...

    def buffer(self, peer: int, header: Bulk, nbytes: int, deferrable: bool) -> memoryview | Later | None:
        if header.step > self.step:
            if deferrable:
                self.late.append((peer, header))
                return LATER
            early = self.early[header] = self.scratch.take(nbytes // 4, torch.float32)
            return bytes_of(early)
        if header.kind == RESULT:
            return self.results.view(header.bucket, header.lo, header.hi)
        fold = self.folds[header.bucket]
        if deferrable and not fold.wants(header.first):
            self.late.append((peer, header))
            return LATER
        return fold.place(header.first, int.from_bytes(header.meta, "little"))

    def bulk(self, peer: int, header: Bulk, view: memoryview) -> None:
        if header.kind == RESULT:
            self.results.mark(header.bucket, header.lo, header.hi, int.from_bytes(header.meta, "little"))
            self._check()
            return
        if header in self.early:
            if header.step > self.step:
                self.whole.append(header)
            else:
                self._accept(header)
            self._retake()
            return
        self.folds[header.bucket].received(header.first)
        self._progress(header.bucket)
        self._retake()

    def control(self, peer: int, body: bytes) -> None: ...

    def lost(self, peer: int, reason: str) -> None:
        print(f"worker {self.rank} lost {peer}: {reason}", file=sys.stderr)

    def broken(self, error: Exception) -> None:
        raise error


def gradients(megabytes: float, seed: int) -> list[torch.Tensor]:
    """A GPT-like list of gradients: matrices of a few sizes and small vectors."""
    generator = torch.Generator().manual_seed(seed)
    width = 256
    shapes: list[tuple[int, ...]] = [(256, width)]
    total = int(megabytes * 1e6 / 4)
    block = [(width,), (width,), (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    while sum(torch.Size(shape).numel() for shape in shapes) < total:
        shapes += block
    return [torch.randn(shape, generator=generator) for shape in shapes]


def worker(rank: int, args: argparse.Namespace, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if args.switch_interval:
        sys.setswitchinterval(args.switch_interval)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.workers,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    listener = Listener("127.0.0.1", b"benchmark" * 4, rank, lambda sock, hello: sock.close())
    pipe.send(listener.port)
    ports: list[int] = pipe.recv()
    members = tuple(Address(peer, "here", "127.0.0.1", port) for peer, port in enumerate(ports))
    number = 0
    while (megabytes := pipe.recv()) is not None:
        leaf = gradients(megabytes, rank)
        buckets = Buckets(leaf, args.bucket << 10, args.first << 10)
        reductions = {}
        for arm in ("pull", "tcp"):
            number += 1
            reduction = Reduction(rank, args.workers, buckets)
            reduction.mesh = Mesh(Generation(1, number), rank, members, listener, reduction, arm == "pull")
            if not reduction.mesh.wait_formed(TIMEOUT_S):
                raise TimeoutError("the mesh did not form")
            reductions[arm] = reduction
        flat = torch.cat([tensor.view(-1) for tensor in leaf])
        pipe.send(len(buckets))
        while (arm := pipe.recv()) is not None:
            cpu = time.process_time()
            start = time.perf_counter()
            if arm == "gloo":
                dist.all_reduce(flat)
            else:
                reductions[arm].run(leaf)
            pipe.send((time.perf_counter() - start, time.process_time() - cpu))
        first = reductions["pull"].results.as_grads()
        for reduction in reductions.values():
            for a, b in zip(first, reduction.results.as_grads(), strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a, b)
            assert reduction.mesh is not None
            reduction.mesh.close()
        pipe.send("closed")
    listener.close()
    dist.destroy_process_group()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[14.0, 40.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket", type=int, default=BUCKET_BYTES >> 10, help="KiB")
    parser.add_argument("--first", type=int, default=FIRST_BUCKET_BYTES >> 10, help="KiB")
    parser.add_argument("--switch-interval", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args)
    print(f"{'MB':>5} {'buckets':>7} {'arm':>5} {'median ms':>10} {'best ms':>8} {'CPU ms, all workers':>20}")
    for row in found:
        print(
            f"{row['megabytes']:5.0f} {row['buckets']:7d} {row['arm']:>5} {row['median_ms']:10.1f}"
            f" {row['best_ms']:8.1f} {row['cpu_ms']:20.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "rows": found}, indent=1) + "\n")


def run(args: argparse.Namespace) -> list[dict[str, float | int | str]]:
    """All sizes and arms; one row each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, float | int | str]] = []
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(args.workers):
            here, there = context.Pipe()
            mine = (rank, args, f"{directory}/store", there)
            process = context.Process(target=worker, args=mine, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        ports = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        for megabytes in args.megabytes:
            rows += measure(pipes, megabytes, args.rounds)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(TIMEOUT_S)
    return rows


def measure(pipes: list[Connection], megabytes: float, rounds: int) -> list[dict[str, float | int | str]]:
    """The arms interleaved, after two rounds to warm up."""
    for pipe in pipes:
        pipe.send(megabytes)
    buckets = min(pipe.recv() for pipe in pipes)
    times: dict[str, list[float]] = {arm: [] for arm in ("pull", "tcp", "gloo")}
    cpus: dict[str, list[float]] = {arm: [] for arm in times}
    for turn in range(rounds + 2):
        for arm in times:
            for pipe in pipes:
                pipe.send(arm)
            answers = [pipe.recv() for pipe in pipes]
            if turn >= 2:
                times[arm].append(max(wall for wall, _ in answers))
                cpus[arm].append(sum(cpu for _, cpu in answers))
    for pipe in pipes:
        pipe.send(None)
    for pipe in pipes:
        pipe.recv()
    return [
        {
            "megabytes": megabytes, "buckets": buckets, "arm": arm,
            "median_ms": statistics.median(times[arm]) * 1e3, "best_ms": min(times[arm]) * 1e3,
            "cpu_ms": statistics.median(cpus[arm]) * 1e3,
        }
        for arm in times
    ]  # fmt: skip


if __name__ == "__main__":
    main()

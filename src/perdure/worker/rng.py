"""What random numbers a piece of work sees (rule E9), and how many threads compute it (rule E5).

A piece of work — a micro-batch, a commit, a sample's transforms — is named by a key of integers and
strings. Its seeds come from a hash of the key alone, so whoever does the work, whenever, and after
whatever else, draws the same numbers:

    digest = blake2b(encode(key), 32 bytes)
    bytes  0 …  7   random.seed(unsigned, little endian)
    bytes  8 … 23   numpy.random.seed(four uint32, little endian)
    bytes 24 … 31   the torch generators' manual_seed(unsigned, little endian)

`torch.manual_seed` does the same for torch alone and takes 110 µs, most of it asking for accelerators
that are absent; the whole of `seed_everything` takes about 15 µs. That matters: a step seeds once a
micro-batch, and data loading once a sample.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from perdure.schema.errors import UsageError

_PYTHON = slice(0, 8)
_NUMPY = slice(8, 24)
_TORCH = slice(24, 32)

_late_cuda_seed: int | None = None
"""The torch seed that CUDA's generators take if CUDA starts before the next seeding; None: not asked for."""


def _encode(key: tuple[int | str, ...]) -> bytes:
    """Bytes that no other key has: integers in decimal, strings with their length in front."""
    parts = []
    for part in key:
        if isinstance(part, str):
            text = part.encode()
            parts.append(b"s%d:%b;" % (len(text), text))
        else:
            parts.append(b"i%d;" % part)
    return b"".join(parts)


def _digest(key: tuple[int | str, ...]) -> bytes:
    return hashlib.blake2b(_encode(key), digest_size=32).digest()


def stable_seed(*key: int | str) -> int:
    """A 64-bit seed for a generator of one's own: the first eight bytes of the key's digest."""
    return int.from_bytes(_digest(key)[_PYTHON], "little")


def seed_everything(*key: int | str) -> None:
    """Seed Python's, numpy's and torch's global generators (CPU, and CUDA where it is in use) from `key`.

    CUDA is never started by this. If it starts later, its generators take the latest key's seed then.
    """
    digest = _digest(key)
    random.seed(int.from_bytes(digest[_PYTHON], "little"))
    np.random.seed(np.frombuffer(digest[_NUMPY], dtype="<u4"))
    torch_seed = int.from_bytes(digest[_TORCH], "little")
    torch.default_generator.manual_seed(torch_seed)
    _seed_cuda(torch_seed)


def _seed_cuda(torch_seed: int) -> None:
    global _late_cuda_seed
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(torch_seed)
        return
    # Asked for once only: torch formats a stack trace for every call that it puts off (0.3 ms).
    first = _late_cuda_seed is None
    _late_cuda_seed = torch_seed
    if first:
        torch.cuda._lazy_call(_seed_late_cuda)  # type: ignore[no-untyped-call]


def _seed_late_cuda() -> None:
    if _late_cuda_seed is not None:
        for generator in torch.cuda.default_generators:
            generator.manual_seed(_late_cuda_seed)


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Before the forward pass of a micro-batch: dropout does not depend on who computes it."""
    seed_everything(seed, "micro-batch", step, micro_batch)


def seed_commit(seed: int, step: int) -> None:
    """Before the user's commit code of a step: every worker draws the same there."""
    seed_everything(seed, "commit", step)


def seed_evaluation(seed: int, step: int, index: int, micro_batch: int) -> None:
    """Before a micro-batch of the `index`-th evaluation after `step`."""
    seed_everything(seed, "evaluation", step, index, micro_batch)


def seed_sample(seed: int, epoch: int, sample: int, stream: int | str = "train") -> None:
    """Before a sample's `__getitem__`, in whichever process that runs; `stream` tells two streams apart."""
    seed_everything(seed, "sample", stream, epoch, sample)


def seed_collate(seed: int, step: int, micro_batch: int, stream: int | str = "train") -> None:
    """Before the collate call of a micro-batch, in whichever process that runs."""
    seed_everything(seed, "collate", stream, step, micro_batch)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards Python's, numpy's and torch's global generators are as they were before."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if started else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def fix_threads(threads: int) -> None:
    """Give this process, and the processes it starts, exactly `threads` compute threads (E5).

    The number decides bits: how a sum is cut into threads decides its rounding. So the libraries are
    also told not to choose fewer on a busy machine (MKL_DYNAMIC; torch tells MKL so by itself in
    `set_num_threads`, the variables are for libraries that are loaded later and for child processes).

    Raises UsageError if `threads` is not a positive integer.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads={threads!r}: expected a positive integer, the job's threads per worker")
    count = str(threads)
    os.environ.update(OMP_NUM_THREADS=count, MKL_NUM_THREADS=count, OMP_DYNAMIC="FALSE", MKL_DYNAMIC="FALSE")
    torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread meanwhile, as torch's loader processes do, so that both get the same bits.

    Costs 0.2 µs; the pool of threads stays.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

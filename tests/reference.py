"""The independent judge: plain PyTorch in the canonical order, knowing nothing of perdure.

It is written from docs/exactness.md, so that a mistake in the runtime is not repeated in its judge.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

FAN_IN = 32


def key_digest(*key: int | str) -> bytes:
    """32 bytes that name a piece of work."""
    parts = (b"i%d;" % p if isinstance(p, int) else b"s%d:%b;" % (len(p.encode()), p.encode()) for p in key)
    return hashlib.blake2b(b"".join(parts), digest_size=32).digest()


def seed_all(*key: int | str) -> None:
    digest = key_digest(*key)
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(np.frombuffer(digest[8:24], dtype="<u4"))
    torch.manual_seed(int.from_bytes(digest[24:], "little"))


def sample_ids(task: Any, samples: int, seed: int, step: int, m: int) -> tuple[int, list[int]]:
    """The epoch and the samples of micro-batch `m` of `step`: none where a last, short step has ended."""
    whole = task.batch_size * task.per_step
    epoch, index = divmod(step, samples // whole if task.drop_last else -(-samples // whole))
    order = np.arange(samples)
    order_seed = int.from_bytes(key_digest(seed, "order", epoch)[:8], "little")
    np.random.Generator(np.random.PCG64(order_seed)).shuffle(order)
    start = (index * task.per_step + m) * task.batch_size
    return epoch, order[start : start + task.batch_size].tolist()


def add_up(terms: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """((t0 + t1) + t2) + …, absent ones skipped."""
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def fold(blocks: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The blocks' sum; more than 32 are added up in runs of 32, and so on."""
    if len(blocks) > FAN_IN:
        return fold([add_up(blocks[i : i + FAN_IN]) for i in range(0, len(blocks), FAN_IN)])
    return add_up(blocks)


def train(task: Any, *, seed: int, steps: int, blocks: int) -> Iterator[str]:
    """Train a task of tests/tasks.py; yields the state's SHA-256 after every step."""
    torch.set_num_threads(1)
    parts, size = task.build(seed), task.per_step // blocks
    modules = [thing for thing in parts.protected.values() if isinstance(thing, torch.nn.Module)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    for step in range(steps):
        committed = values(modules)
        sums, total_weight = [], 0.0
        for block in range(blocks):
            terms = []
            for m in range(block * size, (block + 1) * size):
                if block or not m:
                    put_back(modules, committed)
                epoch, ids = sample_ids(task, len(parts.dataset), seed, step, m)
                if not ids:
                    continue
                samples = []
                for i in ids:
                    seed_all(seed, "sample", "train", epoch, i)
                    samples.append(parts.dataset[i])
                seed_all(seed, "collate", "train", step, m)
                batch = default_collate(samples)
                seed_all(seed, "micro-batch", step, m)
                for parameter in parameters:
                    parameter.grad = None
                loss, weight = parts.loss(batch)
                if loss is not None:
                    (loss * weight).backward()
                    total_weight += weight
                terms.append([parameter.grad for parameter in parameters])
            sums.append([add_up(of_one) for of_one in zip(*terms, strict=True)] or [None] * len(parameters))
            if block == 0:
                first_block = values(modules)
        for parameter, of_one in zip(parameters, zip(*sums, strict=True), strict=True):
            total = fold(of_one)
            parameter.grad = None if total is None else total / total_weight
        put_back(modules, first_block)
        seed_all(seed, "commit", step)
        parts.commit()
        yield state_digest(parts.protected)


def values(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [buffer.detach().clone() for module in modules for buffer in module.buffers()]


@torch.no_grad()
def put_back(modules: Sequence[torch.nn.Module], kept: Sequence[torch.Tensor]) -> None:
    buffers = [buffer for module in modules for buffer in module.buffers()]
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)


def state_digest(protected: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the state_dicts of everything protected, in the order of the names."""
    digest = hashlib.sha256()
    _feed(digest, {name: _state(thing) for name, thing in protected.items()})
    return digest.hexdigest()


def _state(thing: Any) -> Any:
    return thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):  # an optimizer's state is in the order of first touch
            digest.update(f"{key!r}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} in a state_dict is not hashed")

"""Seeding by key (E9) and the number of threads (E5)."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.schema.errors import UsageError
from perdure.worker import rng

KEYS = st.lists(st.one_of(st.integers(), st.text()), max_size=5).map(tuple)


@pytest.fixture(autouse=True)
def _global_state_restored() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_num_threads()
    environment = dict(os.environ)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(states[3])
    os.environ.clear()
    os.environ.update(environment)


def draws() -> list[float]:
    """Some of each library, normal deviates too: those are made in pairs and the second is kept."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_the_same_key_gives_the_same_draws_whatever_was_drawn_before() -> None:
    rng.seed_everything(3, "x", 4)
    first = draws()
    draws()  # leaves half of each pair of normal deviates behind
    rng.seed_everything(3, "x", 4)
    assert draws() == first


def test_the_seeds_follow_the_documented_formula() -> None:
    rng.seed_micro_batch(7, 11, -2)
    got = draws()
    digest = hashlib.blake2b(b"i7;s11:micro-batch;i11;i-2;", digest_size=32).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed([int.from_bytes(digest[at : at + 4], "little") for at in range(8, 24, 4)])
    torch.manual_seed(int.from_bytes(digest[24:], "little"))
    assert got == draws()


def test_every_kind_of_work_has_draws_of_its_own() -> None:
    seen = []
    for seed in (
        lambda: rng.seed_micro_batch(0, 1, 2),
        lambda: rng.seed_micro_batch(0, 2, 1),
        lambda: rng.seed_micro_batch(1, 1, 2),
        lambda: rng.seed_commit(0, 1),
        lambda: rng.seed_evaluation(0, 1, 0, 2),
        lambda: rng.seed_evaluation(0, 1, 1, 2),
        lambda: rng.seed_sample(0, 1, 2),
        lambda: rng.seed_sample(0, 1, 2, "evaluation"),
        lambda: rng.seed_collate(0, 1, 2),
    ):
        seed()
        seen.append(draws())
    for library in zip(*seen, strict=True):
        assert len(set(library)) == len(seen)


@settings(deadline=None)
@given(KEYS, KEYS)
def test_different_keys_have_different_encodings(
    one: tuple[int | str, ...], other: tuple[int | str, ...]
) -> None:
    assert (rng._encode(one) == rng._encode(other)) == (one == other)


def test_parts_of_a_key_do_not_run_together() -> None:
    keys: list[tuple[int | str, ...]] = [(1, 2), (12,), ("12",), ("1", "2"), ("i1;i2;",), (), ("",)]
    assert len({rng.stable_seed(*key) for key in keys}) == len(keys)


def test_cuda_is_not_started() -> None:
    before = torch.cuda.is_initialized()
    rng.seed_everything(1)
    assert torch.cuda.is_initialized() == before


def test_threads_are_fixed_here_and_for_child_processes() -> None:
    rng.fix_threads(2)
    assert torch.get_num_threads() == 2
    assert os.environ["MKL_DYNAMIC"] == "FALSE"
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "2"
    with rng.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, None])
def test_a_senseless_number_of_threads_is_refused(threads: object) -> None:
    with pytest.raises(UsageError, match="positive integer"):
        rng.fix_threads(threads)  # type: ignore[arg-type]

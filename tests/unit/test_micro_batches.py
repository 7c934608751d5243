"""The stream of sample ids, and what MicroBatches refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from perdure.schema.errors import ProtectError, UsageError
from perdure.worker.data import MicroBatches


def bound(samples: int, batch_size: int, per_step: int, **options: Any) -> MicroBatches:
    batches = MicroBatches(range(samples), batch_size, per_step, **options)
    batches.bind(seed=5, default_blocks=1)
    return batches


def epoch_ids(batches: MicroBatches, epoch: int) -> list[list[int]]:
    """The ids of each micro-batch that the epoch has, in order."""
    found = []
    first = epoch * batches.steps_per_epoch
    for step in range(first, first + batches.steps_per_epoch):
        for micro_batch in range(batches.per_step):
            at, ids = batches.sample_ids(step, micro_batch)
            assert at == epoch
            assert bool(ids) == (micro_batch in batches.micro_batches(step))
            if ids:
                found.append(ids)
    return found


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    batch_size, per_step = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return draw(st.integers(batch_size * per_step, 120)), batch_size, per_step


@settings(deadline=None)
@given(shapes(), st.integers(0, 3), st.booleans())
def test_an_epoch_without_the_rest_has_each_sample_at_most_once(
    shape: tuple[int, int, int], epoch: int, shuffle: bool
) -> None:
    samples, batch_size, per_step = shape
    batches = bound(*shape, shuffle=shuffle)
    micro_batches = epoch_ids(batches, epoch)
    assert all(len(ids) == batch_size for ids in micro_batches)
    assert len(micro_batches) == samples // (batch_size * per_step) * per_step
    counts = Counter(sample for ids in micro_batches for sample in ids)
    assert set(counts) <= set(range(samples))
    assert set(counts.values()) == {1}
    if samples % (batch_size * per_step) == 0:
        assert set(counts) == set(range(samples))


@settings(deadline=None)
@given(shapes(), st.integers(0, 3), st.booleans())
def test_an_epoch_with_the_rest_has_each_sample_exactly_once(
    shape: tuple[int, int, int], epoch: int, shuffle: bool
) -> None:
    samples, batch_size, _ = shape
    micro_batches = epoch_ids(bound(*shape, shuffle=shuffle, drop_last=False), epoch)
    assert sorted(sample for ids in micro_batches for sample in ids) == list(range(samples))
    assert all(len(ids) == batch_size for ids in micro_batches[:-1])


@settings(deadline=None)
@given(shapes(), st.integers(0, 40), st.data())
def test_ids_depend_on_the_number_alone(shape: tuple[int, int, int], step: int, data: st.DataObject) -> None:
    """Not on blocks, loader processes, the default number of workers, or what was asked before."""
    micro_batch = data.draw(st.integers(0, shape[2] - 1))
    plain = bound(*shape)
    other = MicroBatches(range(shape[0]), *shape[1:], num_workers=3, blocks=shape[2])
    other.bind(seed=5, default_blocks=17)
    for earlier in data.draw(st.lists(st.integers(0, 400), max_size=4)):
        other.sample_ids(earlier, 0)
    assert other.sample_ids(step, micro_batch) == plain.sample_ids(step, micro_batch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    batches = bound(64, 8, 8)
    first, second = epoch_ids(batches, 0), epoch_ids(batches, 1)
    assert first != second
    assert first != epoch_ids(bound(64, 8, 8, seed=6), 0)
    assert epoch_ids(batches, 0) == first
    assert epoch_ids(bound(64, 8, 8, seed=5), 1) == second


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    batches = bound(10, 2, 2, shuffle=False, drop_last=False)
    assert batches.steps_per_epoch == 3
    assert batches.sample_ids(1, 1) == (0, [6, 7])
    assert list(batches.micro_batches(2)) == [0]
    assert batches.sample_ids(2, 0) == (0, [8, 9])
    assert batches.sample_ids(2, 1) == (0, [])
    assert batches.sample_ids(3, 0) == (1, [0, 1])


def test_only_two_permutations_are_kept() -> None:
    batches = bound(64, 2, 2)
    for epoch in range(9):
        epoch_ids(batches, epoch)
    assert sorted(batches._orders) == [7, 8]
    assert batches._orders[8].itemsize == 4


def test_blocks_are_contiguous_runs_and_default_to_the_workers() -> None:
    batches = MicroBatches(range(100), 1, 8)
    assert not batches.bound
    batches.bind(seed=0, default_blocks=4)
    assert batches.bound
    assert (batches.blocks, batches.seed) == (4, 0)
    assert [batches.block_of(micro_batch) for micro_batch in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for outside in (-1, 8):
        with pytest.raises(IndexError):
            batches.block_of(outside)
        with pytest.raises(IndexError):
            batches.sample_ids(0, outside)
    with pytest.raises(IndexError):
        batches.sample_ids(-1, 0)


def test_what_the_script_named_stays() -> None:
    batches = MicroBatches(range(100), 1, 8, blocks=2, seed=9)
    batches.bind(seed=0, default_blocks=3)
    assert (batches.blocks, batches.seed) == (2, 9)


def test_binding_twice_must_agree() -> None:
    batches = bound(100, 1, 8)
    batches.bind(seed=5, default_blocks=1)
    with pytest.raises(ProtectError, match="make another MicroBatches for this use"):
        batches.bind(seed=5, default_blocks=2)


def test_an_unbound_stream_says_what_to_do() -> None:
    batches = MicroBatches(range(100), 1, 8)
    with pytest.raises(UsageError, match=r"job\.steps"):
        batches.sample_ids(0, 0)
    with pytest.raises(UsageError, match=r"job\.steps"):
        batches.block_of(0)


def test_blocks_must_divide() -> None:
    with pytest.raises(ProtectError, match=r"one of \[1, 2, 4, 8, 16\]"):
        MicroBatches(range(100), 1, 16, blocks=3)
    with pytest.raises(ProtectError, match="first start"):
        MicroBatches(range(100), 1, 16).bind(seed=0, default_blocks=3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Unfinished(Endless):
    def __len__(self) -> int:
        raise NotImplementedError  # as unfinished data sets do; it is refused with what to add


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "IterableDataset"),
        (Endless(), "no __len__"),
        (Unfinished(), "no __len__"),
        (iter([1, 2]), "no __getitem__"),
        ([], "empty"),
        (range(15), "drop_last=False"),
    ],
)
def test_data_sets_that_cannot_work_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(ProtectError, match=message):
        MicroBatches(dataset, 4, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": None},
        {"batch_size": 2.0},
        {"per_step": -1},
        {"per_step": True},
        {"num_workers": -1},
        {"blocks": 0},
        {"seed": "x"},
        {"seed": False},
        {"collate_fn": 3},
        {"shuffle": None},
        {"drop_last": "no"},
        {"pin_memory": 1},
    ],
)
def test_senseless_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*expected"):
        MicroBatches(**{"dataset": range(100), "batch_size": 2, "per_step": 2, **options})


def test_a_small_data_set_is_fine_when_steps_may_be_short() -> None:
    assert bound(3, 4, 4, drop_last=False).micro_batches(0) == range(1)


def test_lists_and_tensors_are_data_sets_too() -> None:
    assert MicroBatches(list(range(8)), 2, 2).samples == 8
    assert MicroBatches(torch.zeros(8, 3), 2, 2).samples == 8

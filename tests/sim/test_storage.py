"""The shared storage: transfers divide its bandwidth evenly, whenever they begin and end."""

from __future__ import annotations

import pytest

from perdure.sim.storage import Storage

GB = 1e9


def test_one_transfer_has_all_of_it() -> None:
    storage: Storage[str] = Storage(2 * GB)
    number = storage.start(5.0, 10 * GB, "a")
    assert storage.next_end() == pytest.approx(10.0)
    assert storage.advance(10.0) == [(number, "a")]
    assert storage.next_end() is None


def test_a_second_one_slows_the_first() -> None:
    """10 GB alone for 2 s of 1 GB/s, then half of it each: 8 GB in 16 s; the other has 2 GB left then."""
    storage: Storage[str] = Storage(GB)
    first = storage.start(0.0, 10 * GB, "a")
    second = storage.start(2.0, 10 * GB, "b")
    assert storage.next_end() == pytest.approx(18.0)
    assert storage.advance(18.0) == [(first, "a")]
    assert storage.next_end() == pytest.approx(20.0)
    assert storage.advance(20.0) == [(second, "b")]
    assert storage.moved_bytes == pytest.approx(20 * GB)


def test_an_abandoned_one_gives_its_share_back() -> None:
    storage: Storage[str] = Storage(GB)
    first = storage.start(0.0, 10 * GB, "a")
    second = storage.start(0.0, 10 * GB, "b")
    storage.stop(10.0, second)
    storage.stop(10.0, 99)  # one that is not there
    assert storage.next_end() == pytest.approx(15.0)
    assert storage.advance(15.0) == [(first, "a")]

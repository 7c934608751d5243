"""The one writer of metrics.jsonl: each step once, in order, whatever comes how often (P18)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.core.records import Differs, Records, Write
from perdure.schema.plan import Record


def record(step: int, digest: str = "") -> Record:
    return Record(step, 0.5, digest or f"d{step}", 1.0, 2)


@given(st.lists(st.integers(0, 8)), st.integers(-1, 4))
def test_each_step_once_in_order(steps: list[int], last: int) -> None:
    records = Records(last)
    written = [w.record.step for step in steps for w in records.add(record(step)) if isinstance(w, Write)]
    assert written == list(range(last + 1, last + 1 + len(written)))
    reachable = last
    while reachable + 1 in steps:
        reachable += 1
    assert records.last == reachable


def test_the_first_line_stays_and_another_digest_is_told() -> None:
    records = Records(1, {0: "a", 1: "b"})
    assert records.add(record(1, "b")) == []
    assert records.add(record(1, "c")) == [Differs(1, "b", "c")]
    assert records.digests[1] == "b"
    assert records.agreed[1] == "c", "what the members agreed on last is what a checkpoint must be of"


def test_a_restored_state_newer_than_the_file_leaves_a_gap() -> None:
    records = Records(2)
    assert records.add(record(4)) == []
    records.resumed(5)
    assert records.add(record(4)) == []
    assert records.add(record(6)) == [Write(record(6))]


def test_an_older_restored_state_changes_no_line() -> None:
    records = Records(5, {5: "d5"})
    records.resumed(2)
    assert records.add(record(3)) == []
    assert records.add(record(6)) == [Write(record(6))]


def test_what_waits_when_everybody_is_lost_is_never_written() -> None:
    """P18: step 1 was committed in a life that left no line of step 0; the next life commits it anew."""
    records = Records()
    assert records.add(record(1)) == []
    records.restart(-1)
    assert [write.record.step for write in records.add(record(0))] == [0]
    assert records.last == 0

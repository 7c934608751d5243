"""When the state is written, and what of it is published: only what the members agreed on (P18, G4)."""

from __future__ import annotations

import pytest

from perdure.core.checkpoints import Ask, Checkpoints, Discard, Publish
from perdure.schema.messages import CheckpointWritten


def written(step: int, digest: str = "d") -> CheckpointWritten:
    return CheckpointWritten(step, digest, f"partial-{step}", 10, 0.1)


@pytest.mark.parametrize(
    ("every", "committed", "step"), [(5, -1, 4), (5, 3, 4), (5, 4, 9), (1, -1, 0), (1, 6, 7)]
)
def test_after_each_so_many_steps(every: int, committed: int, step: int) -> None:
    assert Checkpoints(every).due(committed, 2, now=0.0) == [Ask(2, step)]


def test_by_time() -> None:
    checkpoints = Checkpoints(None, every_s=60.0)
    assert checkpoints.due(3, 1, now=100.0) == []
    assert checkpoints.due(4, 1, now=159.0) == []
    assert checkpoints.due(5, 1, now=160.0) == [Ask(1, 6)]
    assert checkpoints.written(1, written(6), True, {6: "d"}, now=161.0) == [Publish(written(6))]
    assert checkpoints.due(7, 1, now=200.0) == []
    assert checkpoints.due(8, 1, now=222.0) == [Ask(1, 9)]


def test_off_and_nobody_to_write() -> None:
    assert Checkpoints(0).off
    assert Checkpoints(0).due(9, 1, now=0.0) == []
    assert Checkpoints(1).due(9, None, now=0.0) == []


def test_one_at_a_time_and_only_what_is_agreed_on() -> None:
    checkpoints = Checkpoints(1)
    assert checkpoints.due(0, 1, now=0.0) == [Ask(1, 1)]
    assert checkpoints.due(1, 1, now=0.0) == []
    assert checkpoints.written(1, written(1), True, {0: "x"}, now=0.0) == []
    assert checkpoints.due(1, 1, now=0.0) == []
    assert checkpoints.known({0: "x", 1: "d"}) == [Publish(written(1))]
    assert checkpoints.last == 1


def test_another_digest_or_no_member_or_an_old_one_is_thrown_away() -> None:
    checkpoints = Checkpoints(1)
    out = checkpoints.written(1, written(1), True, {1: "other"}, now=0.0)
    assert isinstance(out[0], Discard)
    assert "not the agreed other" in out[0].reason
    assert isinstance(checkpoints.written(1, written(2), False, {2: "d"}, now=0.0)[0], Discard)
    assert checkpoints.written(1, written(3), True, {3: ""}, now=0.0) == [Publish(written(3))]
    assert isinstance(checkpoints.written(1, written(2), True, {2: "d"}, now=0.0)[0], Discard)


def test_a_lost_or_failing_writer_is_replaced_when_the_time_comes() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.due(0, 1, now=0.0)
    checkpoints.lost(2)
    assert checkpoints.due(0, 3, now=0.0) == []
    checkpoints.lost(1)
    assert checkpoints.due(0, 3, now=0.0) == [Ask(3, 1)]
    assert checkpoints.failed(3, 1, now=1.0) == []
    assert checkpoints.due(1, 3, now=1.0) == [Ask(3, 2)]


def test_somebody_elses_late_one_does_not_end_the_waiting() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.final(7, 2)
    checkpoints.written(1, written(7), False, {7: "d"}, now=0.0)
    assert checkpoints.asked == (2, 7)


def test_the_last_state_is_asked_for_once() -> None:
    checkpoints = Checkpoints(5)
    checkpoints.due(7, 1, now=0.0)
    assert checkpoints.final(8, 2) == [Ask(2, 8)]
    assert checkpoints.final(8, 2) == []
    assert checkpoints.written(2, written(8), True, {}, now=0.0) == []
    assert checkpoints.final(8, 2) == [], "it only waits to be known"
    assert checkpoints.known({8: "d"}) == [Publish(written(8))]


def test_what_waits_is_thrown_away_when_the_job_begins_anew() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.written(1, written(4), True, {}, now=0.0)
    out = checkpoints.restart(2)
    assert isinstance(out[0], Discard)
    assert checkpoints.last == 2
    assert checkpoints.known({4: "d"}) == []


def test_a_writer_that_was_asked_before_the_end_may_write_the_last_state_for_that() -> None:
    """Asked for step 58 it comes to it after step 59: it must not write that a second time."""
    checkpoints = Checkpoints(1)
    assert checkpoints.due(56, 1, now=0.0) == [Ask(1, 57)]
    assert checkpoints.final(59, 1) == []
    assert checkpoints.written(1, written(59), True, {59: "d"}, now=0.0) == [Publish(written(59))]
    assert checkpoints.asked is None


@pytest.mark.parametrize("succeeds", [True, False])
def test_the_last_state_is_asked_for_when_an_earlier_one_is_answered(succeeds: bool) -> None:
    checkpoints = Checkpoints(1)
    checkpoints.due(56, 1, now=0.0)
    assert checkpoints.final(59, 1) == []
    if succeeds:
        answer = checkpoints.written(1, written(57), True, {57: "d"}, now=0.0)
        assert answer == [Ask(1, 59), Publish(written(57))]
    else:
        assert checkpoints.failed(1, 57, now=0.0) == [Ask(1, 59)]
    assert checkpoints.final(59, 1) == []
    assert checkpoints.written(1, written(59), True, {59: "d"}, now=0.0) == [Publish(written(59))]


def test_a_step_that_will_never_come_is_not_waited_for() -> None:
    checkpoints = Checkpoints(10)
    assert checkpoints.due(9, 1, now=0.0) == [Ask(1, 19)]
    assert checkpoints.final(12, 1) == [Ask(1, 12)]


def test_a_writer_that_dies_before_the_last_state_is_forgotten() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.due(56, 1, now=0.0)
    checkpoints.final(59, 1)
    checkpoints.lost(1)
    assert checkpoints.final(59, 2) == [Ask(2, 59)]
    assert checkpoints.written(2, written(59), True, {59: "d"}, now=0.0) == [Publish(written(59))]


def test_what_a_dead_writer_wrote_goes_with_it_unless_it_is_being_published() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.due(0, 1, now=0.0)
    checkpoints.written(1, written(1), True, {}, now=0.0)
    assert checkpoints.gone(2) == []
    assert checkpoints.gone(1) == [Discard(written(1), "its writer is gone")]
    assert checkpoints.known({1: "d"}) == []
    checkpoints.written(2, written(2), True, {2: "d"}, now=0.0)
    assert checkpoints.gone(2) == []
    assert checkpoints.last == 2


def test_what_could_not_be_put_in_place_may_be_written_again() -> None:
    checkpoints = Checkpoints(1)
    checkpoints.written(1, written(1), True, {1: "d"}, now=0.0)
    assert checkpoints.written(1, written(3), True, {3: "d"}, now=0.0) == [Publish(written(3))]
    checkpoints.not_placed(3)
    assert checkpoints.last == 1
    assert checkpoints.written(2, written(3), True, {3: "d"}, now=0.0) == [Publish(written(3))]

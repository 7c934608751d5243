"""The coordinator's state machine after the last step: whose script is run again to its end, and where."""

from __future__ import annotations

from typing import Any

import pytest

from job_rig import SHAPE, Rig, digest, training
from perdure.schema import messages as msg

LAST = SHAPE.until - 1


def two_nodes_in_tails(**settings: Any) -> Rig:
    """Worker 0, alone on node a, leads; worker 1 is at home, on b."""
    rig = Rig(home_node="b", **settings)
    rig.hello("a", workers=1)
    rig.hello("b", workers=1)
    rig.started()
    rig.serve()
    if len(rig.members) == 1:
        rig.commit()
        rig.switch()
    assert rig.members == (0, 1)
    while rig.hands[0].committed < LAST:
        rig.commit()
    rig.finish()
    if rig.told(1, msg.Checkpoint):
        rig.write(1, LAST)
    rig.restored = LAST
    assert rig.job.phase == "released"
    return rig


def leave(rig: Rig, node: str) -> None:
    rig.take(rig.job.agent_lost(node, rig.now))
    rig.wait(0.6)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("others_end_first", [True, False])
def test_the_leaders_tail_is_run_again_when_its_node_is_lost(others_end_first: bool, nodes: int) -> None:
    """Also by fewer nodes than the job began with: there is nothing left to train."""
    rig = two_nodes_in_tails(min_nodes=nodes)
    if others_end_first:
        rig.exit(1, code=0)
    leave(rig, "a")
    assert [start.node for start in rig.starts] == ["b"]
    assert rig.said[-1] == "worker 0 led: what follows the loop is run again by another one"
    rig.started()
    rig.serve()
    rig.finish()
    rig.exit(2, code=0)
    if not others_end_first:
        rig.exit(1, code=0)
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


@pytest.mark.parametrize("when", ["at once", "restored"])
@pytest.mark.parametrize("others_end_first", [True, False])
def test_who_was_started_for_a_tail_may_be_lost_as_well(others_end_first: bool, when: str) -> None:
    rig = two_nodes_in_tails(min_nodes=2)
    if others_end_first:
        rig.exit(1, code=0)
    leave(rig, "a")
    for life in (2, 3):
        assert [start.worker for start in rig.starts] == [life]
        if when == "restored":
            rig.started()
            rig.serve()
        else:
            rig.starts.clear()
            rig.take(rig.job.worker_started(life, 1, rig.now))
        rig.kill(life)
        rig.wait(1.0)
    rig.started()
    rig.serve()
    rig.finish()
    rig.exit(4, code=0)
    if not others_end_first:
        rig.exit(1, code=0)
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


def test_without_checkpoints_the_loss_of_the_leaders_tail_is_told() -> None:
    rig = two_nodes_in_tails(checkpoint_every=0)
    leave(rig, "a")
    assert rig.ended is not None
    assert (rig.ended.exit_code, "without checkpoints it cannot run again" in rig.ended.message) == (1, True)
    assert not any("run again by another one" in line for line in rig.said)


def test_who_leads_is_known_when_the_last_state_is_in_place() -> None:
    """The leader before may have died while that was written."""
    rig = training(workers=1, home_node="b")
    rig.hello("b", workers=1)
    rig.hello("c", workers=1)
    rig.started()
    rig.serve()
    rig.switch()
    while rig.hands[0].committed < LAST:
        rig.commit()
    rig.finish()
    rig.kill(0)
    rig.serve()
    rig.finish()
    assert rig.job.phase == "saving"
    for worker in rig.members:
        for ask in rig.told(worker, msg.Checkpoint):
            rig.write(worker, ask.step)
    leader = rig.members[0] if rig.members else 1
    rig.starts.clear()
    leave(rig, rig.hands[leader].node)
    assert len(rig.starts) == 1


def test_the_tail_of_another_is_not() -> None:
    rig = two_nodes_in_tails()
    rig.exit(0, code=0)
    leave(rig, "b")
    assert not rig.starts
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


def test_nor_is_that_of_a_job_that_was_asked_to_stop() -> None:
    rig = training(workers=1, home_node="b")
    rig.take(rig.job.asked(15, rig.now))
    rig.serve()
    rig.commit()
    rig.switch()
    rig.finish()
    rig.write(0, 1)
    assert rig.told(0, msg.Release)[0].exit_code == 143
    rig.hello("b", workers=1)
    leave(rig, "a")
    assert not rig.starts
    assert rig.ended is not None
    assert (rig.ended.exit_code, rig.ended.message) == (143, "")


def test_the_leaders_tail_is_run_again_when_it_died_while_its_node_was_out_of_reach() -> None:
    rig = two_nodes_in_tails()
    rig.exit(1, code=0)
    rig.take(rig.job.agent_lost("a", rig.now))
    rig.hello("a", workers=1)
    assert rig.ended is None, "how it ended may be told yet"
    rig.exit(0, signum=9)
    assert [start.node for start in rig.starts] == ["a"]


def test_the_last_state_that_was_written_before_it_was_agreed_on_is_put_in_place() -> None:
    new = Rig(incarnation=2, last_step=LAST, digests={s: digest(s) for s in range(LAST + 1)}, blocks=2)
    new.hello("a", workers=1)
    new.started()
    new.serve()
    new.job.records.forget(4)
    new.hands[0].committed = LAST
    new.write(0, LAST)
    new.say(0, msg.Finished(LAST, digest(LAST), None))
    while new.publish:
        written = new.publish.pop(0).written
        new.take(new.job.published(written, "/c/x", "", new.now))
    for ask in new.told(0, msg.Checkpoint):
        new.write(0, ask.step)
    assert new.told(0, msg.Release)


def test_the_tail_after_a_break_is_run_again_without_a_step() -> None:
    rig = training(workers=2, steps=4)
    for worker in rig.members:
        rig.say(worker, msg.Finished(3, digest(3), rig.record(3), by_itself=True))
    rig.write(0, 3)
    rig.restored = 3
    rig.kill(1)
    rig.started()
    assert rig.told(2, msg.Restore) == [msg.Restore(("/c/3",), left_after=3)]


def test_the_last_state_of_members_that_came_back_late_is_put_in_place() -> None:
    """Others had begun again from a checkpoint; what had been agreed on beyond it was forgotten for that."""
    new = Rig(incarnation=2, last_step=9, digests={s: digest(s) for s in range(10)}, blocks=2)
    new.restored = 4
    new.hello("b", workers=1)
    new.started()
    new.serve()
    new.job.records.forget(4)
    new.hands[0].committed = 9
    new.say(0, msg.Finished(9, digest(9), None))
    new.write(0, 9)
    assert new.told(0, msg.Release)

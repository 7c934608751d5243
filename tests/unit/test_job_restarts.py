"""The coordinator's state machine after a restart: whom the one before had, signals, nodes that come back."""

from __future__ import annotations

import pytest

from job_rig import Rig, restarted, training
from perdure.schema import messages as msg


def test_a_new_coordinator_collects_everybody_before_it_opens_a_number_of_its_own() -> None:
    """P9."""
    new = restarted(training(workers=3, steps=4), min_nodes=2)
    new.hands[1].committed += 1  # it was quicker than the others when the old one died
    new.hello("a", workers=1, seen=[0])
    assert not new.told(0, msg.Seal)
    new.hello("b", workers=2, seen=[1, 2])
    new.serve()
    assert new.members == (0, 1, 2)
    assert new.opened()[-1]["generation"] == "2.1"
    assert new.opened()[-1]["base"] == 4
    assert not new.starts
    assert new.kills == []


def test_a_worker_that_was_given_up_is_not_taken_back_by_a_new_coordinator() -> None:
    """G4."""
    old = training(workers=2)
    old.hello("b", workers=1)
    old.started()
    old.serve()
    old.switch()
    old.take(old.job.agent_lost("b", old.now))
    old.wait(60.0)
    assert old.given_up == [2]
    new = restarted(old, given_up=tuple(old.given_up))
    new.hello(seen=[0, 1])
    new.hello("b", workers=1, seen=[2])
    assert new.kills == [2]


def test_a_new_coordinator_does_not_wait_for_ever_and_judges_who_died_meanwhile() -> None:
    new = restarted(training(workers=3, steps=4))
    del new.hands[2]
    new.hello(workers=3, seen=[0, 1])
    new.exit(2, signum=9)
    assert new.faults() == [(2, "signal", "replace")]
    assert [start.worker for start in new.starts] == [3]
    new.starts.clear()  # its node is slow
    new.wait(10.1)
    new.serve()
    assert new.members == (0, 1)
    assert new.opened()[-1]["base"] == 3


def test_a_stop_while_positions_are_collected_still_saves_the_state() -> None:
    new = restarted(training(workers=2, steps=4), min_nodes=2)
    new.hello("a", workers=1, seen=[0])
    new.take(new.job.asked(15, new.now))
    assert new.ended is None
    new.hello("b", workers=1, seen=[1])
    new.serve()
    new.switch()
    new.finish()
    assert new.told(0, msg.Checkpoint)[-1].step == 3
    new.write(0, 3)
    assert new.told(1, msg.Release)[0].exit_code == 143


def test_a_stop_while_positions_are_collected_ends_the_run_when_nobody_is_left() -> None:
    new = restarted(training(workers=1, steps=4), min_nodes=2)
    new.hello("a", workers=1, seen=[0])
    new.take(new.job.asked(15, new.now))
    new.kill(0)
    assert new.ended is None, "others may come"
    new.wait(10.1)
    assert new.ended is not None
    assert new.ended.exit_code == 143


def test_a_stop_before_anybody_has_come_back_does_not_speak_of_losses() -> None:
    new = restarted(training(workers=1, steps=4), min_nodes=2)
    new.hello("a", workers=1)
    assert new.said[-1] == "waiting for 1 more node (--nnodes)"
    new.take(new.job.asked(15, new.now))
    assert "waiting 10 s at most for workers of before" in new.said[-1]
    new.wait(10.1)
    assert new.ended is not None
    assert new.ended.message == "ended before training went on"


@pytest.mark.parametrize("ready", [True, False])
def test_a_stop_that_finds_only_new_workers_does_not_ask_them_for_the_state(ready: bool) -> None:
    """Nor does it wait for them for longer than it says."""
    new = restarted(training(workers=1, steps=4))
    new.hands.clear()
    new.hello("a", workers=2)
    new.take(new.job.asked(15, new.now))
    assert "waiting 10 s at most" in new.said[-1]
    if ready:
        new.started()
        assert new.told(3, msg.Seal) == []
    new.wait(9.0)
    assert new.ended is None, "another node may bring those of before"
    new.wait(1.1)
    assert new.ended is not None
    assert new.ended.message == "ended before training went on"


def elastic(old: Rig) -> Rig:
    """A new coordinator of a job that may go on with one node of the two that it had."""
    settings = {"min_nodes": 1, "max_nodes": 2, "cut_off": True, "checkpoints": ("/c/1",)}
    return restarted(old, **settings)


def test_a_job_that_may_be_smaller_waits_for_the_nodes_of_before_after_its_launcher_was_lost() -> None:
    """Their workers have a newer state than the checkpoint."""
    new = elastic(training(workers=1, steps=4))
    kept = new.hands.pop(0)
    new.restored = 1
    new.hello("a", workers=1)
    assert new.said == ["waiting 10 s at most for workers of before the launcher was lost"]
    new.started()
    assert not new.told(3, msg.Restore)
    new.hands[0] = kept
    new.hello("b", workers=1, seen=[0])
    new.serve()
    assert (new.members, new.opened()[-1]["base"], new.kills) == ((0, 3), 3, [])


def test_it_does_not_wait_for_ever() -> None:
    new = elastic(training(workers=1, steps=4))
    new.hands.clear()
    new.restored = 1
    new.hello("a", workers=1)
    new.started()
    new.wait(10.1)
    new.serve()
    assert (new.members, new.opened()[-1]["base"]) == ((3,), 1)


def test_a_signal_that_the_coordinator_before_was_told_of_is_not_forgotten() -> None:
    new = restarted(training(workers=2, steps=4), min_nodes=2)
    new.hello("a", workers=1, seen=[0], asked=15)
    new.hello("b", workers=1, seen=[1], asked=15)
    new.serve()
    new.switch()
    new.take(new.job.agent_lost("b", new.now))
    new.hello("b", workers=1, seen=[1], asked=15)
    assert new.ended is None, "told again it is no second signal"
    new.serve()
    new.finish()
    new.write(0, 3)
    assert new.told(1, msg.Release)[0].exit_code == 143


def test_a_node_with_workers_of_another_job_is_turned_away() -> None:
    """Their numbers may be those of workers of this one."""
    new = restarted(training(workers=1, steps=4))
    new.hello("a", workers=1, seen=[0], key="another")
    assert new.turned_away == ["a"]
    assert not new.job.staff.nodes
    assert not new.kills


def test_when_those_of_before_die_new_workers_take_the_checkpoint_at_once() -> None:
    """They are not asked for a state that they cannot have, and are not lost for that."""
    new = restarted(training(workers=1, steps=4), checkpoints=("/c/3",), min_nodes=2, max_nodes=2)
    new.restored = 3
    new.hello("a", workers=1)
    new.hello("b", workers=1, seen=[0])
    new.kill(0)
    new.started()
    new.serve()
    assert len(new.members) == 2
    assert "going on from /c/3: step 3 is the last committed one" in new.said
    assert not any("lost" in said or "no survivor" in said for said in new.said)
    assert new.kills == []


def test_a_signal_to_a_script_without_perdure_is_passed_on_in_every_run() -> None:
    rig = Rig(incarnation=2)
    rig.hello(workers=1)
    worker = rig.starts.pop().worker
    rig.take(rig.job.worker_started(worker, 1, rig.now))
    rig.take(rig.job.asked(15, rig.now))
    assert rig.kills == [worker]
    assert rig.said[-1] == "signal 15: passed on to the workers; again to end at once"


def test_a_stop_that_comes_before_any_other_node_waits_for_them_once() -> None:
    new = restarted(training(workers=1, steps=4))
    new.hello("b", workers=1)
    new.take(new.job.asked(15, new.now))
    assert new.ended is None
    new.hello("a", workers=1, seen=[0])
    new.wait(10.1)
    new.serve()
    new.switch()
    new.finish()
    new.write(0, 3)
    assert new.told(0, msg.Release)[0].exit_code == 143

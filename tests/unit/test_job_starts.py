"""The coordinator's state machine while workers and nodes start: who is waited for, tried again, refused."""

from __future__ import annotations

import msgspec
import pytest

from job_rig import SHAPE, Rig, digest, restarted, training
from perdure.core.staff import PAUSE_S_MAX, Node
from perdure.schema import messages as msg
from perdure.schema.plan import Position


def test_the_lowest_number_of_nodes_is_waited_for() -> None:
    rig = Rig(min_nodes=2)
    rig.hello("a", workers=1)
    assert not rig.starts
    rig.hello("b", workers=2)
    assert [(s.node, s.rank, s.world) for s in rig.starts] == [("a", 0, 3), ("b", 1, 3), ("b", 2, 3)]


def test_workers_that_train_something_else_end_the_run() -> None:
    rig = Rig()
    rig.hello(workers=2)
    late = rig.starts.pop()
    rig.started()
    rig.starts.append(late)
    rig.started(msgspec.structs.replace(SHAPE, per_step=4))
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    assert "per_step is 4, not 8" in rig.ended.message


def test_other_blocks_than_before_end_the_run() -> None:
    rig = Rig(blocks=4)
    rig.hello(workers=1)
    rig.started()
    assert rig.ended is not None
    assert (rig.ended.exit_code, "keep it, or start anew with --fresh" in rig.ended.message) == (4, True)


def test_deaths_at_start_up_end_the_run_when_nobody_trains() -> None:
    rig = Rig()
    rig.hello(workers=1)
    for _ in range(3):
        assert rig.ended is None
        start = rig.starts.pop(0)
        rig.take(rig.job.worker_started(start.worker, 1, rig.now))
        rig.say(start.worker, msg.Joined())
        rig.kill(start.worker)
        rig.wait(1.0)
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    assert "at start-up, before job.steps began: signal 9" in rig.ended.message


def fail_to_start(rig: Rig) -> None:
    """Every worker that was ordered raises the same error before its first step."""
    orders = [start.worker for start in rig.starts]
    rig.starts.clear()
    for worker in orders:
        rig.take(rig.job.worker_started(worker, 1, rig.now))
        rig.say(worker, msg.Joined())
    for worker in orders:
        rig.crash(worker)
        rig.exit(worker, code=1)
    rig.wait(20.0)


def test_a_node_on_which_nobody_gets_to_the_first_step_is_turned_away_and_the_others_go_on() -> None:
    """All between two commits, so that the same error comes again without progress."""
    rig = training(workers=2)
    rig.hello("b", workers=2)
    for attempt in range(3):
        assert rig.turned_away == [], attempt
        fail_to_start(rig)
    assert rig.turned_away == ["b"]
    assert "3 workers in a row ended here before they had done a step" in rig.said[-1]
    assert set(rig.job.staff.workers) == {0, 1}
    rig.commit()
    assert rig.ended is None


@pytest.mark.parametrize("how", ["its first batch", "healing"])
def test_a_node_whose_workers_get_no_further_than_that_is_turned_away(how: str) -> None:
    """A data set may open its files when it is first asked; an optimizer may be another kind."""
    rig = training(workers=2, max_failures=4)
    rig.hello("b", workers=2)
    for life in range(3):
        assert rig.turned_away == [], life
        rig.wait(20.0)
        rig.started()
        rig.serve()
        rig.switch()
        current = rig.job.membership.current
        assert current is not None
        new = [worker for worker in rig.members if worker > 1]
        assert len(new) == 2
        for worker in new:
            if how == "healing":
                rig.say(worker, msg.HealFailed(current.generation, "opt was saved from SGD"))
            else:
                rig.say(worker, msg.Computed(current.generation, 1, worker))
                rig.crash(worker)
        for worker in new:
            rig.exit(worker, code=1)
        rig.serve()
    assert rig.turned_away == ["b"]
    assert rig.ended is None
    rig.commit()
    assert rig.members == (0, 1)


@pytest.mark.parametrize("how", ["error", "usage", "another script", "first batch"])
def test_what_fails_while_a_new_coordinator_collects_those_of_before_does_not_end_them(how: str) -> None:
    """Its node's script may have been changed, or have other arguments now."""
    new = restarted(training(workers=2, steps=4), min_nodes=2, first_worker=2, home_node="b")
    new.hello("a", workers=2, seen=[0, 1])
    new.hello("b", workers=1)
    for life in range(4):
        (start,) = new.starts
        if how == "another script":
            new.started(msgspec.structs.replace(SHAPE, per_step=4))
        elif how == "first batch":
            new.started()
        else:
            new.starts.clear()
            new.take(new.job.worker_started(start.worker, 1, new.now))
            new.say(start.worker, msg.Joined())
        new.serve()
        if any(hand.prepared for hand in new.hands.values()):
            new.switch()
        if how != "another script":
            kind = "perdure.UsageError" if how == "usage" else "OSError"
            new.crash(start.worker, kind, user=how == "usage")
        new.exit(start.worker, code=1)
        new.wait(20.0)
        new.serve()
        assert new.ended is None, life
    assert (new.members, new.kills.count(0), new.kills.count(1)) == ((0, 1), 0, 0)
    new.commit()


def test_those_of_before_are_right_about_what_is_trained() -> None:
    """Also if a new worker, of another script, was ready before their node came back."""
    new = restarted(training(workers=2, steps=4), min_nodes=2, first_worker=2, home_node="b")
    kept, new.hands = new.hands, {}
    new.hello("c", workers=1)
    new.hello("b", workers=1)
    other = next(start.worker for start in new.starts if start.node == "b")
    new.shapes[other] = msgspec.structs.replace(SHAPE, per_step=4)
    new.starts = [start for start in new.starts if start.worker == other]
    new.started()
    new.hands |= kept
    new.hello("a", workers=2, seen=[0, 1])
    assert new.kills == [other]
    new.exit(other, signum=9)
    new.wait(10.1)
    new.serve()
    assert new.members == (0, 1)
    assert new.ended is None


def test_workers_that_fail_in_turn_are_each_started_after_one_that_failed() -> None:
    """While one is being started the other fails, and so on: each replaces one, none was started together."""
    node = Node("b", "h", 2, 0, 1)
    for failed, newest in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]:
        node.start_failed(failed, newest, 0.0)
    assert node.failed_starts == 3
    for worker in range(10, 3000):
        node.start_failed(worker, worker, 0.0)
    assert node.hire_from == PAUSE_S_MAX


def test_nodes_that_were_turned_away_do_not_hold_back_the_others_replacements() -> None:
    rig = training(workers=2)
    for name in "bcdef":
        rig.hello(name, workers=1)
        while name not in rig.turned_away:
            fail_to_start(rig)
    rig.kill(1)
    assert [start.node for start in rig.starts] == ["a"]


def test_replacements_that_cannot_start_do_not_end_the_training_of_the_others() -> None:
    rig = training(workers=2, max_failures=2)
    rig.kill(1)
    rig.serve()
    for _ in range(10):
        assert len(rig.starts) == 1
        fail_to_start(rig)
    assert rig.ended is None
    rig.started()
    rig.serve()
    rig.switch()
    assert len(rig.members) == 2


def test_workers_killed_together_at_start_up_are_replaced() -> None:
    """Whoever kills three of four starting workers at once shows no crash loop."""
    rig = Rig()
    rig.hello(workers=4)
    first = [rig.starts.pop(0).worker for _ in range(4)]
    for worker in first:
        rig.take(rig.job.worker_started(worker, 1, rig.now))
        rig.say(worker, msg.Joined())
    for worker in first[:3]:
        rig.kill(worker)
    rig.wait(1.0)
    assert rig.ended is None
    assert len(rig.starts) == 3


def test_workers_that_cannot_be_started_beside_others_are_tried_again_with_pauses() -> None:
    """The system refuses processes (exit code 71, and no WorkerStarted); those that are there train on."""
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    tried = [start.worker for start in rig.starts]
    times = []
    while len(tried) < 7:
        rig.exit(tried[-1], code=71)
        rig.starts.clear()
        asked = rig.now
        while not rig.starts:
            rig.wait(0.05)
        tried.append(rig.starts[0].worker)
        times.append(rig.now - asked)
    assert rig.ended is None
    assert tried == list(range(2, 9))
    assert times == sorted(times)
    assert times[-1] > 1.0
    rig.started()
    rig.serve()
    rig.kill(0)
    assert rig.starts, "after a start that went well there is no pause"


def test_workers_that_are_killed_as_they_join_are_replaced_at_once_but_not_for_ever() -> None:
    """As for lack of memory, when they take the state."""
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    pauses = []
    for life in range(2, 12):
        rig.started()
        asked = rig.now
        rig.exit(life, signum=9)
        while not rig.starts:
            rig.wait(0.05)
        pauses.append(round(rig.now - asked, 1))
        rig.serve()
    assert pauses[:3] == [0] * 3
    assert pauses == sorted(pauses)
    assert pauses[-1] > 5.0
    assert rig.ended is None


def test_a_node_that_trains_something_else_is_turned_away_and_the_others_go_on() -> None:
    rig = training(workers=2)
    rig.hello("b", workers=2)
    rig.started(msgspec.structs.replace(SHAPE, until=40))
    assert rig.turned_away == ["b"]
    assert "until is 40, not 10; start it with the script and arguments of the other nodes" in rig.said[-1]
    rig.take(rig.job.agent_lost("b", rig.now))
    rig.commit()
    assert rig.ended is None
    assert rig.members == (0, 1)
    assert set(rig.job.staff.workers) == {0, 1}
    assert rig.faults() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_node_that_is_turned_away_while_it_comes_back_leaves_nothing(workers: int) -> None:
    rig = training(workers=2)
    rig.hello("b", workers=workers)
    other = msgspec.structs.replace(SHAPE, until=40)
    there = []
    for worker in [start.worker for start in rig.starts]:
        rig.take(rig.job.worker_started(worker, 1, rig.now))
        rig.say(worker, msg.Joined())
        ready = msg.Ready("h", 1, other, Position(worker=worker))
        there.append(msg.WorkerSeen(worker, 1, True, ready))
    rig.take(rig.job.agent_lost("b", rig.now))
    hello = msg.AgentHello("b", "host-b", workers, 0, ("train.py",), "0", tuple(there))
    rig.take(rig.job.agent_joined(hello, rig.now))
    assert rig.turned_away == ["b"]
    assert set(rig.job.staff.workers) == {0, 1}
    assert set(rig.job.staff.nodes) == {"a"}
    rig.commit()
    assert rig.ended is None


@pytest.mark.parametrize("how", ["other steps", "wrong use"])
def test_a_newcomer_that_is_wrong_while_the_last_state_is_written_ends_nothing(how: str) -> None:
    rig = training(workers=2, steps=SHAPE.until - 1)
    rig.kill(1)
    rig.serve()
    start = rig.starts.pop()
    rig.take(rig.job.worker_started(start.worker, 1, rig.now))
    rig.say(start.worker, msg.Joined())
    for worker in rig.members:
        rig.hands[worker].committed += 1
    rig.finish()
    assert rig.job.phase == "saving"
    if how == "other steps":
        other = msgspec.structs.replace(SHAPE, until=40)
        rig.say(start.worker, msg.Ready("h", 1, other, Position(worker=start.worker)))
    else:
        rig.crash(start.worker, kind="perdure.schema.errors.UsageError", user=True)
    assert rig.ended is None
    rig.write(0, SHAPE.until - 1)
    assert rig.told(0, msg.Release)


def test_the_ranks_of_nodes_stay_different_when_one_leaves() -> None:
    rig = training(workers=1)
    rig.hello("b", workers=1)
    rig.hello("c", workers=1)
    rig.starts.clear()
    rig.take(rig.job.agent_lost("b", rig.now))
    rig.wait(1.0)
    rig.hello("d", workers=1)
    assert {name: node.rank for name, node in rig.job.staff.nodes.items()} == {"a": 0, "c": 2, "d": 1}


def test_a_worker_that_differs_from_its_own_nodes_others_ends_the_run() -> None:
    rig = Rig()
    rig.hello(workers=2)
    rig.shapes[1] = msgspec.structs.replace(SHAPE, per_step=4)
    rig.started()
    assert rig.ended is not None
    assert (rig.ended.exit_code, rig.turned_away) == (1, [])
    text = "worker 1 trains something else than the others: per_step is 4, not 8"
    assert rig.ended.message == text


def test_a_node_too_many_is_turned_away_and_changes_nothing() -> None:
    rig = Rig(max_nodes=2)
    for node in ("a", "b"):
        rig.hello(node, workers=1)
    rig.started()
    rig.serve()
    rig.hello("c", workers=1)
    assert rig.turned_away == ["c"]
    assert not rig.starts
    assert rig.members == (0, 1)
    rig.take(rig.job.agent_lost("c", rig.now))
    rig.take(rig.job.agent_lost("b", rig.now))
    rig.hello("c", workers=1)
    assert [start.node for start in rig.starts] == ["c"]


def test_a_replacement_that_trains_something_else_does_not_end_the_training_of_the_others() -> None:
    """The script was edited in the meantime."""
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    for attempt in range(4):
        rig.started(msgspec.structs.replace(SHAPE, until=40))
        assert rig.said[-1].endswith(
            "it trains something else than the others: until is 40, not 10; was the script changed?; "
            "another takes its place"
        )
        rig.exit(2 + attempt, signum=9)
        assert rig.starts == []
        rig.wait(20.0)
    assert rig.ended is None
    rig.commit()
    rig.started()
    rig.serve()
    rig.switch()
    assert len(rig.members) == 2


def test_a_worker_that_breaks_off_in_its_first_step_is_not_a_witness_for_the_others() -> None:
    """Its script may have been changed since they began."""
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    rig.started()
    rig.serve()
    rig.switch()
    rig.commit(1)
    rig.say(2, msg.Finished(1, "d1", None, by_itself=True))
    rig.job.status(msg.Status((msg.Progress(0, 1000, "compute", 2, 3, 0),)))
    rig.wait(0.1)
    assert rig.ended is None
    rig.wait(1.0)
    assert rig.kills == [2], "it is judged once"
    assert len(rig.faults()) == 2
    assert "left job.steps by `break` after step 1, worker 0 did not; was the script changed?" in rig.said[-1]
    rig.exit(2, signum=9)
    rig.serve()
    assert rig.members == (0,)


def test_a_joiner_that_comes_when_the_others_break_off_ends_with_them() -> None:
    """It has never run the step after which they did so."""
    rig = training(workers=2, steps=3)
    rig.kill(1)
    rig.serve()
    rig.started()
    rig.serve()
    rig.commit(1)
    rig.switch()
    step = rig.hands[0].committed
    rig.hands[0].finished = True
    rig.say(0, msg.Finished(step, digest(step), None, by_itself=True))
    rig.job.status(msg.Status((msg.Progress(2, 1000, "compute", step + 1, 3, 0),)))
    rig.wait(0.1)
    rig.wait(1.0)
    assert rig.kills == [2]
    assert rig.said[-1] == "worker 2 came when the script left job.steps: not needed any more"
    rig.exit(2, signum=9)
    rig.serve()
    rig.say(0, msg.Finished(step, digest(step), None, by_itself=True))
    rig.write(0, step)
    assert rig.told(0, msg.Release)[0].exit_code == 0
    assert rig.ended is None
    assert len(rig.faults()) == 1

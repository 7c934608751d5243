"""The coordinator's state machine, event by event."""

from __future__ import annotations

from job_rig import SHAPE, Rig, restarted, training
from perdure.core.failures import ALL_LOST_LIMIT
from perdure.schema import messages as msg
from perdure.schema.ids import Generation
from perdure.schema.plan import Record


def test_the_first_generation_opens_when_all_are_at_their_first_step() -> None:
    rig = Rig()
    rig.hello(workers=3)
    assert [(s.worker, s.local_rank, s.rank, s.world) for s in rig.starts] == [
        (0, 0, 0, 3), (1, 1, 1, 3), (2, 2, 2, 3),
    ]  # fmt: skip
    last = rig.starts.pop()
    rig.started()
    assert rig.job.membership.opening is None
    rig.starts.append(last)
    rig.started()
    rig.serve()
    assert rig.members == (0, 1, 2)
    assert rig.opened()[0]["reason"] == "start"
    assert rig.blocks == [2]
    assert rig.job.phase == "training"
    assert {row.state for row in rig.job.rows()} == {"active"}


# ── restoring ───────────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_is_restored_by_a_worker_of_the_home_node_before_anything_opens() -> None:
    rig = Rig(home_node="b", checkpoints=("/c/4", "/c/2"), last_step=5, min_nodes=2)
    rig.restored = 4
    rig.hello("a", workers=1)
    rig.hello("b", workers=1)
    rig.started()
    assert rig.told(1, msg.Restore)[0].paths == ("/c/4", "/c/2")
    assert not rig.told(0, msg.Restore)
    rig.serve()
    assert rig.opened()[0]["base"] == 4
    assert rig.opened()[0]["joiners"] == (0,)
    assert any("going on from /c/4: step 4" in text for text in rig.said)
    rig.commit(2)  # steps 5 and 6; the line of 5 is there already
    assert [record.step for record in rig.written] == [6]


def test_when_no_checkpoint_can_be_used_the_run_ends_with_5() -> None:
    rig = Rig(checkpoints=("/c/4",))
    rig.hello(workers=1)
    rig.started()
    rig.serve()
    assert rig.ended is not None
    assert rig.ended.exit_code == 5


def test_another_worker_restores_if_the_first_dies_of_it() -> None:
    rig = Rig(checkpoints=("/c/4",))
    rig.restored = 4
    rig.hello(workers=2)
    rig.started()
    rig.kill(0)
    rig.started()
    rig.serve()
    assert rig.members
    assert rig.opened()[0]["base"] == 4


def test_after_a_total_loss_training_goes_on_from_the_last_checkpoint() -> None:
    rig = training(steps=5)
    rig.write(0, 2)
    rig.restored = 2
    for worker in (0, 1):
        rig.kill(worker)
    rig.started()
    rig.serve()
    assert rig.members == (2, 3)
    assert rig.opened()[-1]["base"] == 2
    rig.commit(4)  # 3 and 4 come again, with the same digest
    assert [record.step for record in rig.written] == [0, 1, 2, 3, 4, 5, 6]
    assert not rig.events("digest_differs")


def test_a_step_that_comes_again_with_another_digest_is_an_event() -> None:
    rig = training(steps=3)
    rig.say(rig.members[0], msg.Published(Record(1, 1.0, "another", rig.now, 2)))
    assert rig.events("digest_differs")[0]["step"] == 1
    assert len(rig.written) == 3


def test_steps_that_come_again_are_events_and_what_happens_in_them_is_told_of_them() -> None:
    rig = training(workers=2, steps=6)
    for worker in rig.members:
        rig.kill(worker)
    rig.started()
    rig.serve()
    rig.seen.clear()
    rig.commit(2)
    assert [(e["step"], e["time"]) for e in rig.events("step_again")] == [(0, rig.now - 1), (1, rig.now)]
    victim = rig.members[1]
    doing = msg.Progress(victim, pid=1, phase="compute", step=2, micro_batch=0, samples=0)
    rig.take(rig.job.worker_exited(msg.WorkerExited(victim, 9, None, 0.0, 0.0, doing=doing), rig.now))
    del rig.hands[victim]
    assert rig.events("fault_detected")[0]["step"] == 2
    rig.serve()
    rig.commit(6)
    assert [again["step"] for again in rig.events("step_again")] == [0, 1, 2, 3, 4, 5]


def test_a_new_coordinator_asks_for_checkpoints_of_the_steps_that_come_again_too() -> None:
    """The file is further than the members: the old one died while they did steps again."""
    old = training(workers=2, steps=2)
    new = restarted(old, checkpoint_every=5)
    new.hello("a", workers=2, seen=[0, 1])
    new.serve()
    new.commit()
    assert new.told(0, msg.Checkpoint)[-1].step == 4
    lagging = restarted(old, checkpoint_every=5, last_step=40)
    lagging.hello("a", workers=2, seen=[0, 1])
    lagging.serve()
    lagging.commit()
    assert lagging.told(0, msg.Checkpoint)[-1].step == 4


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_worker_leaves_at_once_and_its_replacement_joins_at_a_boundary() -> None:
    rig = training(workers=3)
    rig.kill(1)
    assert [start.worker for start in rig.starts] == [3]
    assert rig.starts[0].local_rank == 1
    rig.serve()
    assert rig.members == (0, 2)
    assert rig.opened()[-1]["lost"] == (1,)
    rig.started()
    rig.serve()
    assert rig.members == (0, 2)  # prepared, not yet switched
    rig.commit()
    rig.switch()
    assert set(rig.members) == {0, 2, 3}
    assert rig.opened()[-1]["reason"] == "switch"
    assert rig.events("healed")
    assert rig.faults() == [(1, "signal", "replace")]


def test_the_others_go_on_without_a_worker_that_is_ending_before_it_has_ended() -> None:
    rig = training(workers=3)
    rig.ending(1)
    rig.serve()
    assert rig.members == (0, 2)
    assert (rig.faults(), rig.starts) == ([], [])
    assert len(rig.opened()) == 2
    rig.say(1, msg.Leaving())
    assert rig.faults() == []
    rig.exit(1, signum=9)
    assert rig.faults() == [(1, "signal", "replace")]
    assert len(rig.starts) == 1
    assert len(rig.opened()) == 2
    rig.started()
    rig.serve()
    rig.switch()
    assert rig.members == (0, 2, 3)


def test_an_end_that_was_ordered_or_comes_after_the_last_step_is_no_loss() -> None:
    rig = training(workers=2)
    rig.say(1, msg.Leaving())
    rig.serve()
    rig.switch()
    opened = len(rig.opened())
    rig.ending(1)
    rig.exit(1, code=0)
    assert len(rig.opened()) == opened


def test_an_exception_is_judged_when_it_is_told_and_its_exit_means_nothing() -> None:
    rig = training(workers=2)
    rig.crash(0)
    assert rig.faults() == [(0, "exception", "replace")]
    assert [start.worker for start in rig.starts] == [2]
    assert {row.id: row.state for row in rig.job.rows()}[0] == "dead"
    rig.serve(0)
    assert rig.members == (1,)
    rig.exit(0, code=1)
    assert len(rig.faults()) == 1
    assert rig.job.failures.count == 1


def test_a_dead_workers_last_lines_are_in_the_events() -> None:
    """After an exception they come with the exit; the traceback is known before."""
    rig = training(workers=3)
    rig.exit(0, signum=11, tail="Fatal Python error: Segmentation fault")
    assert rig.events("fault_detected")[0]["last_lines"] == "Fatal Python error: Segmentation fault"
    rig.crash(1)
    assert rig.events("fault_detected")[1]["traceback"].endswith("ValueError: it broke\n")
    rig.exit(1, code=1, tail="and what it said on its way out")
    assert [(e["worker"], e["last_lines"]) for e in rig.events("worker_exited")] == [
        (1, "and what it said on its way out")
    ]


def test_a_process_that_lingers_after_its_exception_is_killed_in_the_end() -> None:
    rig = training(workers=2)
    rig.crash(0)
    rig.wait(9.0)
    assert rig.kills == []
    rig.wait(2.0)
    assert rig.kills == [0]


def test_the_same_error_twice_without_progress_ends_the_run_with_the_first_traceback() -> None:
    rig = training(workers=3)
    rig.crash(0)
    rig.serve(0)
    rig.crash(1)
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    assert rig.ended.message.startswith("Traceback (most recent call last):\nValueError: it broke\n")
    assert "again without progress" in rig.ended.message
    assert set(rig.kills) >= {1, 2}


def test_the_same_error_after_a_commit_is_another_fault() -> None:
    rig = training(workers=3)
    for worker in (0, 1):
        rig.crash(worker)
        rig.exit(worker, code=1)
        rig.serve()
        rig.commit()
    assert rig.ended is None
    assert [action for _, _, action in rig.faults()] == ["replace", "replace"]


def test_wrong_use_ends_the_run_at_once_with_its_own_code_and_says_it_once() -> None:
    rig = training()
    rig.crash(0, kind="perdure.schema.errors.UsageError", user=True)
    assert rig.ended is not None
    assert rig.ended.exit_code == 4
    assert rig.ended.message.count("it broke") == 1


def test_wrong_use_is_one_line_with_its_place() -> None:
    rig = training()
    rig.crash(0, kind="perdure.schema.errors.UsageError", line=12, user=True)
    assert rig.ended is not None
    assert rig.ended.message == "train.py:12: it broke"


def test_losing_everybody_again_and_again_without_progress_ends_the_run_however_they_end() -> None:
    rig = training(workers=2)
    for _ in range(ALL_LOST_LIMIT):
        assert rig.ended is None
        for worker in rig.members:
            rig.exit(worker, code=9)
        rig.started()
        rig.serve()
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    assert "exited with code 9" in rig.ended.message
    assert "every worker was lost; training goes on from the beginning" in rig.said


def test_losing_everybody_with_progress_in_between_is_no_loop() -> None:
    rig = training(workers=2)
    for number in range(2 * ALL_LOST_LIMIT):
        for hand in rig.hands.values():
            hand.committed = number - 1
        rig.commit(2)
        for worker in rig.members:
            rig.kill(worker)
        rig.started()
        rig.serve()
    assert rig.ended is None


def test_the_failure_budget_ends_the_run_with_3() -> None:
    rig = training(workers=3, max_failures=1)
    rig.kill(0)
    rig.serve()
    rig.kill(1)
    assert rig.ended is not None
    assert rig.ended.exit_code == 3
    assert rig.events("given_up")


def test_a_node_that_does_not_come_back_in_time_is_lost_with_its_workers() -> None:
    rig = Rig(min_nodes=2)
    rig.hello("a", workers=1)
    rig.hello("b", workers=2)
    rig.started()
    rig.serve()
    rig.take(rig.job.agent_lost("b", rig.now))
    rig.wait(0.3)
    assert set(rig.members) == {0, 1, 2}
    rig.wait(0.3)
    del rig.hands[1], rig.hands[2]
    rig.serve()
    assert rig.members == (0,)
    assert rig.faults() == [(1, "node", "replace"), (2, "node", "replace")]
    assert not rig.starts, "nobody can be started there"
    rig.exit(1, signum=9)  # told late
    assert len(rig.faults()) == 2
    rig.take(rig.job.agent_lost("a", rig.now))
    rig.wait(1.0)
    assert rig.ended is not None
    assert rig.ended.message == "every node is lost"


# ── connections ─────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_that_came_back_asks_for_positions_and_an_exit_that_was_kept_is_judged() -> None:
    rig = training(workers=3)
    rig.take(rig.job.agent_lost("a", rig.now))
    gone = rig.hands.pop(2)
    rig.hello(workers=3, seen=[0, 1])
    assert gone.id == 2
    rig.serve()
    assert rig.members == (0, 1)
    assert rig.faults() == []
    rig.exit(2, signum=11)
    assert rig.faults() == [(2, "signal", "replace")]
    assert [start.worker for start in rig.starts] == [3]


def test_a_worker_that_is_gone_without_a_word_is_a_fault_too() -> None:
    rig = training(workers=2)
    del rig.hands[1]
    rig.hello(seen=[0])
    rig.serve()
    rig.wait(1.1)
    assert rig.faults() == [(1, "node", "replace")]
    rig.exit(1, signum=9)
    assert len(rig.faults()) == 1


def test_an_order_that_was_under_way_is_given_again() -> None:
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    [order] = rig.starts
    rig.starts.clear()
    rig.hello(seen=[0])
    assert rig.starts == [order]
    rig.started()
    rig.serve()
    rig.switch()
    assert set(rig.members) == {0, 2}


def test_an_order_that_was_lost_together_with_its_end_is_not_given_again() -> None:
    rig = training(workers=1)
    rig.hello("b", workers=1)
    (order,) = rig.starts
    rig.starts.clear()
    rig.take(rig.job.agent_lost("b", rig.now))
    rig.commit(SHAPE.until - 2)
    rig.hands[0].committed += 1
    rig.finish()
    rig.write(0, SHAPE.until - 1)
    assert rig.kills == [order.worker]
    rig.hello("b", workers=1)
    assert not rig.starts
    assert rig.kills == [order.worker, order.worker], "it may be about to start"
    rig.exit(order.worker, signum=9)
    rig.exit(0, code=0)
    assert rig.faults() == []
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


def test_trouble_without_a_death_is_a_new_generation_of_the_same_members() -> None:
    """P11."""
    rig = training(workers=2)
    generation = rig.hands[0].generation
    rig.say(0, msg.Trouble(generation, 1, "reset"))
    rig.wait(0.5)
    assert len(rig.opened()) == 1
    rig.wait(0.6)
    rig.serve()
    assert len(rig.opened()) == 2
    assert rig.members == (0, 1)
    assert rig.faults() == []


def test_connections_that_keep_failing_cost_a_worker() -> None:
    rig = training(workers=3)
    for _ in range(4):
        rig.say(0, msg.Trouble(rig.hands[0].generation, 2, "reset"))
        rig.wait(1.1)
        rig.serve()
    assert rig.faults() == [(2, "hang", "replace")]


def test_trouble_in_the_next_generation_too_is_not_forgotten_with_the_older_one() -> None:
    rig = training(workers=3)
    rig.kill(2)
    rig.serve()
    rig.started()
    rig.serve()
    now = rig.hands[0].generation
    planned = rig.hands[0].prepared
    assert planned is not None
    rig.say(0, msg.Trouble(now, 1, "reset"))
    rig.say(0, msg.Trouble(planned.generation, 1, "reset"))
    rig.switch()
    opened = len(rig.opened())
    rig.wait(1.1)
    rig.serve()
    assert len(rig.opened()) == opened + 1


def test_trouble_of_an_older_generation_means_nothing() -> None:
    rig = training(workers=2)
    rig.say(0, msg.Trouble(Generation(1, 0), 1, "reset"))
    rig.wait(2.0)
    assert len(rig.opened()) == 1


def test_a_worker_that_does_not_answer_a_seal_is_replaced() -> None:
    rig = training(workers=3)
    rig.kill(0)
    rig.serve(2)
    rig.wait(31.0)
    assert rig.faults()[-1] == (2, "hang", "replace")
    rig.hands.pop(2)
    rig.serve()
    assert rig.members == (1,)


def test_a_joiner_that_gets_no_state_in_time_is_dropped() -> None:
    """P15."""
    rig = training(workers=2)
    rig.kill(1)
    rig.serve()
    rig.started()
    rig.serve()
    plan = rig.hands[0].prepared
    assert plan is not None
    for hand in rig.hands.values():
        hand.prepared = None
        hand.generation = plan.generation
        rig.say(hand.id, msg.Adopted(plan.generation, 0))
    assert {row.id: row.state for row in rig.job.rows()} == {0: "active", 2: "joining"}
    rig.wait(61.0)
    assert rig.faults()[-1] == (2, "hang", "replace")
    rig.hands.pop(2)
    rig.serve()
    assert rig.members == (0,)

"""The coordinator's state machine from verdicts and leavers to the end, and what it keeps meanwhile."""

from __future__ import annotations

import pytest

from job_rig import SHAPE, Rig, digest, training
from perdure.core.failures import ALL_LOST_LIMIT
from perdure.core.heals import CAUSE
from perdure.core.saving import SAVES_MAX
from perdure.schema import messages as msg
from perdure.schema.plan import Position, Record

# ── verdicts ────────────────────────────────────────────────────────────────────────────────────────


def test_the_minority_of_a_digest_is_replaced() -> None:
    """P8."""
    rig = training(workers=3)
    rig.refuse([1])
    assert rig.faults() == [(1, "corrupt", "replace")]
    assert rig.kills == [1]
    del rig.hands[1]
    rig.serve()
    assert rig.members == (0, 2)
    assert rig.job.membership.current is not None
    assert rig.job.membership.current.void == (1,)


def test_of_two_that_differ_the_older_one_is_believed() -> None:
    rig = training(workers=2)
    rig.refuse([0])
    assert rig.faults() == [(1, "corrupt", "replace")]


def test_what_was_not_fine_is_computed_again_in_a_new_generation() -> None:
    """P7."""
    rig = training(workers=2)
    rig.refuse([], unfit=(1,))
    rig.serve()
    assert rig.events("refused_step")[0]["unfit"] == (1,)
    assert rig.faults() == []
    assert rig.job.membership.current is not None
    assert rig.job.membership.current.void == (1,)
    assert len(rig.opened()) == 2


def replace(rig: Rig, worker: int) -> int:
    """A worker is gone; its replacement joins."""
    rig.hands.pop(worker, None)
    rig.serve()
    new = rig.starts[0].worker
    rig.started()
    rig.serve()
    rig.switch()
    return new


def test_two_joiners_in_a_row_that_differ_end_the_run_and_name_the_cause() -> None:
    """E14."""
    rig = training(workers=3)
    rig.kill(1)
    joiner = replace(rig, 1)
    rig.refuse([joiner])
    assert rig.ended is None
    rig.exit(joiner, signum=9)
    joiner = replace(rig, joiner)
    rig.refuse([joiner])
    assert rig.ended is not None
    assert (rig.ended.exit_code, rig.ended.message) == (1, CAUSE)
    assert rig.faults()[-1] == (joiner, "corrupt", "stop")


def test_a_joiner_that_agreed_once_is_as_good_as_the_others() -> None:
    rig = training(workers=3)
    for _ in range(3):
        victim = rig.members[-1]
        rig.kill(victim)
        joiner = replace(rig, victim)
        rig.commit(2)
        rig.refuse([joiner])
        rig.exit(joiner, signum=9)
        replace(rig, joiner)
        rig.commit(2)
    assert rig.ended is None


def test_an_error_that_ends_the_run_leaves_the_line_of_every_committed_step() -> None:
    """P18: a line waits for the next step's headers, which an error of the script in that step prevents."""
    rig = training(workers=2)
    rig.commit()
    rig.crash(0, records=(rig.record(1), rig.record(2)))
    assert [record.step for record in rig.written] == [0, 1]
    rig.serve(0)
    rig.crash(1, records=(rig.record(2),))
    assert rig.ended is not None
    assert [record.step for record in rig.written] == [0, 1, 2]


# ── leaving and stopping ────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_is_told_to_leave_hands_over_at_a_boundary() -> None:
    rig = training(workers=2)
    rig.say(1, msg.Leaving())
    assert [start.worker for start in rig.starts] == [2]
    assert not rig.told(1, msg.Release)
    rig.started()
    rig.serve()
    rig.commit()
    rig.switch()
    assert set(rig.members) == {0, 2}
    assert rig.told(1, msg.Release)[0].exit_code == 143
    rig.exit(1, code=143)
    assert rig.faults() == [(1, "leave", "leave")]
    assert rig.events("left")[0]["worker"] == 1


def test_a_leaver_that_was_let_go_may_end_while_the_others_switch_again() -> None:
    """P12, P16: it has given its state, and nobody is interrupted for it."""
    rig = training(workers=2)
    rig.say(1, msg.Leaving())
    rig.started()
    rig.serve()
    rig.commit()
    rig.switch()
    rig.say(2, msg.Leaving())
    rig.started()
    rig.serve()
    rig.commit()
    plan = rig.hands[0].prepared
    assert plan is not None
    rig.adopt(rig.hands[0], plan, rig.hands[0].committed)
    rig.exit(1, code=143)
    assert rig.job.membership.opening is None


def test_a_stop_ends_at_a_boundary_with_the_state_saved() -> None:
    rig = training(workers=2)
    rig.take(rig.job.asked(15, rig.now))
    rig.serve()
    rig.commit()
    rig.switch()
    rig.finish()
    assert rig.told(0, msg.Checkpoint)[0].step == 1
    rig.write(0, 1)
    assert rig.told(1, msg.Release)[0].exit_code == 143
    for worker in (0, 1):
        rig.exit(worker, code=143)
    assert rig.ended is not None
    assert rig.ended.exit_code == 143
    assert rig.faults() == []


def test_a_signal_at_each_nodes_launcher_is_one_wish() -> None:
    """As a scheduler ends a job; a second one at the same launcher is another matter."""
    rig = training(workers=2)
    rig.hello("b", workers=1)
    for node in ("a", "b"):
        rig.take(rig.job.asked(15, rig.now, node))
    assert rig.ended is None
    assert sum("finishing the step and saving" in said for said in rig.said) == 1
    rig.take(rig.job.asked(15, rig.now, "b"))
    assert rig.ended is not None
    assert rig.ended.message == "ended at once"


def test_a_second_signal_ends_at_once() -> None:
    rig = training(workers=2)
    rig.take(rig.job.asked(2, rig.now))
    assert rig.ended is None
    rig.take(rig.job.asked(2, rig.now))
    assert rig.ended is not None
    assert rig.ended.exit_code == 130
    assert set(rig.kills) == {0, 1}


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────


def end_of(rig: Rig) -> None:
    rig.commit(SHAPE.until - 2)
    for worker in rig.members:
        rig.hands[worker].committed += 1
    rig.finish()


def test_a_stop_between_a_total_loss_and_the_start_after_it_says_what_is_left() -> None:
    rig = training(workers=1, steps=3)
    rig.kill(0)
    assert rig.starts, "its replacement is on its way and has not joined"
    rig.take(rig.job.asked(2, rig.now))
    assert rig.ended is not None
    assert rig.ended.exit_code == 130
    assert rig.ended.message == "ended while no worker had the state; a later run goes on from the beginning"


def test_the_last_state_is_written_before_anybody_goes() -> None:
    """P17."""
    rig = training(workers=2)
    end_of(rig)
    assert rig.job.phase == "saving"
    assert [record.step for record in rig.written] == list(range(SHAPE.until))
    assert not rig.told(0, msg.Release)
    rig.write(0, SHAPE.until - 1)
    assert rig.job.phase == "released"
    for worker in (0, 1):
        assert rig.told(worker, msg.Release)[0].exit_code == 0
        rig.exit(worker, code=0)
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


def test_if_the_writer_of_the_last_state_dies_another_writes_it() -> None:
    rig = training(workers=2)
    end_of(rig)
    rig.crash(0)
    assert rig.told(1, msg.Checkpoint)[-1].step == SHAPE.until - 1
    rig.serve(0)
    rig.write(1, SHAPE.until - 1)
    assert rig.told(1, msg.Release)


def test_total_losses_while_the_last_state_is_written_are_told_and_counted() -> None:
    rig = training(workers=2)
    for life in range(ALL_LOST_LIMIT):
        assert rig.ended is None
        rig.commit(SHAPE.until - 2 if life == 0 else SHAPE.until - 1)
        for worker in rig.members:
            rig.hands[worker].committed += 1
        rig.finish()
        assert rig.job.phase == "saving"
        for worker in rig.members:
            rig.kill(worker)
        rig.started()
        rig.serve()
    assert rig.said.count("every worker was lost; training goes on from the beginning") == ALL_LOST_LIMIT - 1
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    assert "every worker was lost 5 times in a row, none beyond step 10" in rig.ended.message


def test_a_loss_that_the_others_end_before_is_told_all_the_same() -> None:
    """A large process takes its time to end; nobody takes its place any more."""
    rig = training(workers=2)
    rig.ending(1)
    rig.serve()
    end_of(rig)
    rig.write(0, SHAPE.until - 1)
    rig.exit(0, code=0)
    assert rig.ended is None
    rig.exit(1, code=0)
    assert rig.faults() == [(1, "exit", "replace")]
    assert rig.said[-1] == "worker 1: exited with code 0 before the loop ended"
    assert rig.ended is not None
    assert rig.ended.exit_code == 0


def test_only_the_tail_that_crashed_is_run_again() -> None:
    rig = training(workers=3)
    end_of(rig)
    rig.write(0, SHAPE.until - 1)
    rig.restored = SHAPE.until - 1
    rig.exit(0, code=0)
    rig.crash(1)
    assert [(start.worker, start.local_rank) for start in rig.starts] == [(3, 1)]
    rig.exit(1, code=1)
    rig.exit(2, code=0)
    assert rig.ended is None
    rig.started()
    rig.serve()
    assert rig.members == (3,)
    rig.finish()
    rig.exit(3, code=0)
    assert rig.ended is not None
    assert rig.ended.exit_code == 0
    assert rig.faults() == [(1, "exception", "replace")]


def test_a_tail_that_crashes_again_is_the_scripts_error() -> None:
    rig = training(workers=1)
    end_of(rig)
    rig.write(0, SHAPE.until - 1)
    rig.restored = SHAPE.until - 1
    rig.crash(0)
    rig.exit(0, code=1)
    rig.started()
    rig.serve()
    rig.finish()
    rig.crash(1)
    assert rig.ended is not None
    assert rig.ended.exit_code == 1


def test_tails_that_are_lost_again_and_again_end_the_run() -> None:
    rig = training(workers=2)
    end_of(rig)
    rig.write(0, SHAPE.until - 1)
    rig.restored = SHAPE.until - 1
    rig.exit(1, code=0)
    worker = 0
    while rig.ended is None and worker < 2 * ALL_LOST_LIMIT:
        rig.kill(worker)
        if rig.ended is None:
            rig.started()
            worker = max(rig.hands)
            rig.serve()
            rig.finish()
    assert len(rig.faults()) == ALL_LOST_LIMIT
    assert rig.ended is not None
    assert rig.ended.exit_code == 1
    text = "5 workers in a row were lost after the last step, before the script ended; the last one "
    assert rig.ended.message.endswith(text + "ended by signal 9")


def test_without_checkpoints_a_crashed_tail_cannot_run_again() -> None:
    rig = training(workers=1, checkpoint_every=0)
    end_of(rig)
    assert rig.job.phase == "released"
    rig.crash(0)
    assert rig.ended is not None
    assert "without checkpoints it cannot run again" in rig.ended.message


# ── hard state and dealt work ───────────────────────────────────────────────────────────────────────


def test_checkpoints_are_asked_for_published_and_asked_for_again() -> None:
    rig = training(workers=2, steps=1, checkpoint_every=3)
    assert [ask.step for ask in rig.told(0, msg.Checkpoint)] == [2]
    rig.commit(2)
    rig.write(0, 2)
    assert rig.events("checkpoint_written")[0]["path"] == "/c/2"
    rig.commit()
    assert [ask.step for ask in rig.told(0, msg.Checkpoint)] == [2, 5]


@pytest.mark.parametrize("found", ["wrong digest", "not a member"])
def test_a_checkpoint_that_is_not_everybodys_is_thrown_away(found: str) -> None:
    rig = training(workers=2, steps=3, checkpoint_every=3)
    if found == "wrong digest":
        rig.say(0, msg.CheckpointWritten(2, "another", "/c/2.partial", 10, 0.1))
    else:
        rig.say(1, msg.Leaving())
        rig.started()
        rig.serve()
        rig.switch()
        rig.say(1, msg.CheckpointWritten(2, "digest of 2", "/c/2.partial", 10, 0.1))
    assert rig.publish == []
    assert rig.discarded == ["/c/2.partial"]
    assert rig.events("checkpoint_refused")


def test_what_is_put_in_place_late_is_not_the_newest() -> None:
    """Two checkpoints are put in place at once; that of the last state is done first."""
    rig = training(workers=3, steps=1, checkpoint_every=3)
    rig.commit(2)
    rig.say(0, msg.CheckpointWritten(2, digest(2), "/c/2.partial", 10, 0.1))
    (late,) = rig.publish
    rig.publish.clear()
    end_of(rig)
    rig.write(0, SHAPE.until - 1)
    rig.take(rig.job.published(late.written, "/c/2", "", rig.now))
    rig.crash(1)
    for worker in (1, 0, 2):
        rig.exit(worker, code=int(worker == 1))
    rig.started()
    (restore,) = rig.told(3, msg.Restore)
    assert restore.paths == (f"/c/{SHAPE.until - 1}", "/c/2")


def test_the_last_state_is_written_by_another_when_one_has_it_wrong() -> None:
    """P17: its memory may have been damaged after it had finished."""
    rig = training(workers=2, checkpoint_every=100)
    rig.commit()
    rig.finish()
    asked = [worker for worker in (0, 1) if rig.told(worker, msg.Checkpoint)]
    assert len(asked) == 1
    (first,) = asked
    rig.say(first, msg.CheckpointWritten(1, "damaged", "/c/1.partial", 10, 0.1))
    assert rig.discarded == ["/c/1.partial"]
    rig.write(1 - first, 1)
    assert rig.events("checkpoint_written")[-1]["step"] == 1
    assert rig.told(1 - first, msg.Release)


def test_a_last_state_that_cannot_be_put_in_place_is_written_again_and_then_given_up() -> None:
    rig = training(workers=2, checkpoint_every=100)
    rig.commit()
    rig.finish()
    for _ in range(2 * SAVES_MAX):
        if not (asked := [worker for worker in (0, 1) if rig.told(worker, msg.Checkpoint)]):
            break
        rig.hands[asked[0]].told.clear()
        rig.say(asked[0], msg.CheckpointWritten(1, digest(1), "/c/1.partial", 10, 0.1))
        written = rig.publish.pop().written
        rig.take(rig.job.published(written, "", "No such file or directory", rig.now))
    assert "checkpoint of step 1 was not put in place: No such file or directory" in rig.said
    assert rig.said[-1] == "the last state is not saved"
    assert rig.told(0, msg.Release)


def test_after_a_total_loss_checkpoints_and_evaluations_are_those_of_the_new_life() -> None:
    rig = training(workers=1, steps=5, checkpoint_every=3)
    rig.say(0, msg.EvaluationAsk(4, 0, 1))
    rig.say(0, msg.EvaluationResult(4, 0, 0, {"x": 1.0}, 1.0))
    rig.kill(0)
    rig.started()
    rig.serve()
    assert rig.hands[1].committed == -1
    rig.commit(2)
    assert [ask.step for ask in rig.told(1, msg.Checkpoint)] == [2]
    rig.say(1, msg.CheckpointWritten(2, "another bit", "/c/2.partial", 10, 0.1))
    assert not rig.discarded, "the agreed digest of step 2 is the older life's"
    rig.commit(3)
    rig.say(1, msg.EvaluationAsk(4, 0, 1))
    assert rig.told(1, msg.EvaluationDeal)
    assert not rig.told(1, msg.EvaluationAll)


def test_a_step_that_is_still_to_come_again_is_not_acknowledged() -> None:
    """Its record would be dropped by the members, and a checkpoint of it would wait for ever."""
    rig = training(workers=2, steps=3, last_step=8)
    assert [said.step for said in rig.told(0, msg.Acknowledged)] == [0, 1, 2]


def test_an_error_that_comes_again_after_some_steps_is_no_loop_though_their_lines_are_there() -> None:
    rig = training(workers=2, steps=1, last_step=8)
    rig.crash(0)
    rig.exit(0, code=1)
    rig.serve()
    rig.started()
    rig.serve()
    rig.switch()
    rig.commit(3)
    rig.crash(1)
    assert rig.ended is None
    assert [action for _, _, action in rig.faults()] == ["replace", "replace"]


def test_a_life_that_ends_before_the_last_line_of_metrics_ends_all_the_same() -> None:
    """P17: lines of an earlier life may go further than the state that is saved now."""
    rig = training(workers=1, checkpoint_every=100, last_step=7)
    rig.commit()
    rig.finish()
    rig.write(0, 1)
    assert rig.told(0, msg.Release)


def test_an_evaluation_goes_on_with_whoever_is_left() -> None:
    rig = training(workers=2)
    for worker in (0, 1):
        rig.say(worker, msg.EvaluationAsk(1, 0, 3))
    assert [deal.micro_batches for deal in rig.told(0, msg.EvaluationDeal)] == [(0,)]
    assert [deal.micro_batches for deal in rig.told(1, msg.EvaluationDeal)] == [(1,)]
    rig.crash(0)
    rig.say(1, msg.EvaluationResult(1, 0, 1, {"x": 1.0}, 1.0))
    rig.say(1, msg.EvaluationResult(1, 0, 0, {"x": 0.0}, 1.0))
    rig.say(1, msg.EvaluationResult(1, 0, 2, {"x": 2.0}, 2.0))
    [answer] = rig.told(1, msg.EvaluationAll)
    assert answer.values == ({"x": 0.0}, {"x": 1.0}, {"x": 2.0})
    assert answer.weights == (1.0, 1.0, 2.0)


def test_a_save_is_published_once_however_often_it_is_asked_for() -> None:
    rig = training(workers=2)
    request = msg.SaveRequest(0, 0, "/m/.x.w0.partial", "/m/x")
    rig.say(0, request)
    rig.say(0, request)
    assert len(rig.saves) == 1
    rig.take(rig.job.saved(0, request, "", rig.now))
    rig.say(0, request)
    assert [answer.reason for answer in rig.told(0, msg.SaveAnswer)] == ["", ""]
    assert len(rig.saves) == 1
    rig.say(0, msg.SaveRequest(0, 1, request.partial, request.path))
    assert len(rig.saves) == 2, "the next job.save, to the same path"


def test_a_save_waits_until_a_new_coordinator_knows_the_members() -> None:
    """Its request was on its way when the old one died; it comes again after the seal."""
    rig = Rig(incarnation=2, max_nodes=2)
    rig.hello(workers=1)
    rig.started()
    rig.say(0, msg.SaveRequest(0, 0, "/m/.x.w0.partial", "/m/x"))
    assert rig.job.membership.current is None
    assert not rig.told(0, msg.SaveAnswer)
    assert not rig.saves


def test_a_stranger_at_a_workers_port_is_written_down() -> None:
    rig = training(workers=2)
    rig.say(1, msg.Stranger("1.2.3.4:5", "it does not know the secret"))
    assert rig.events("refused")[0]["peer"] == "1.2.3.4:5"


def test_that_bits_may_not_come_again_is_said_once() -> None:
    """E12."""
    rig = Rig()
    rig.hello(workers=2)
    for start in rig.starts:
        rig.take(rig.job.worker_started(start.worker, 1, rig.now))
        rig.say(start.worker, msg.Joined())
        position = Position(worker=start.worker)
        rig.say(start.worker, msg.Ready("h", 1, SHAPE, position, "replica-consistent, not exact"))
    assert rig.said.count("replica-consistent, not exact") == 1


def test_what_a_dead_worker_says_changes_nothing() -> None:
    """G4."""
    rig = training(workers=2)
    rig.kill(0)
    rig.serve()
    written = len(rig.written)
    rig.say(0, msg.Published(Record(7, 1.0, "x", 0.0, 1)))
    rig.say(0, msg.CheckpointWritten(7, "x", "/c/7.partial", 1, 0.1))
    assert len(rig.written) == written
    assert rig.publish == []


def test_a_break_of_all_before_the_first_step_is_a_clean_end() -> None:
    rig = training(workers=2, steps=0)
    for worker in rig.members:
        rig.say(worker, msg.Finished(-1, digest(-1), None, by_itself=True))
    assert [rig.told(worker, msg.Release)[0].exit_code for worker in (0, 1)] == [0, 0]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("resumed", [-1, 2])
def test_a_break_that_not_all_take_before_their_first_step_ends_the_run_too(gone: int, resumed: int) -> None:
    rig = Rig(checkpoints=() if resumed < 0 else ("/c/2",), last_step=resumed, blocks=2)
    rig.restored = resumed
    rig.hello(workers=2)
    rig.started()
    rig.serve()
    step, other, current = resumed, rig.members[1 - gone], rig.job.membership.current
    assert current is not None
    assert current.base == step
    rig.say(other, msg.Computed(current.generation, step + 1, 1))
    rig.say(rig.members[gone], msg.Finished(step, digest(step), None, by_itself=True))
    rig.job.status(msg.Status((msg.Progress(other, 1000, "compute", step + 1, 1, 0),)))
    rig.wait(0.1)
    assert rig.ended is not None
    assert rig.ended.exit_code == 4
    when = "before the first step" if step < 0 else "after step 2"
    assert f"left job.steps by `break` {when}, worker {other} did not" in rig.ended.message


def test_a_break_that_not_all_workers_take_ends_the_run_and_says_so() -> None:
    rig = training(workers=2)
    rig.say(0, msg.Finished(1, "d1", None, by_itself=True))

    def other(phase: str) -> None:
        rig.job.status(msg.Status((msg.Progress(1, 1001, phase, 2, 3, 0),)))
        rig.wait(0.1)

    other("commit")
    assert rig.ended is None
    other("compute")
    assert rig.ended is not None
    assert rig.ended.exit_code == 4
    assert "worker 0 left job.steps by `break` after step 1, worker 1 did not" in rig.ended.message

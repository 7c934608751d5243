"""What a death means: a fault is replaced, an error that repeats is the script's, a loop ends (G7)."""

from __future__ import annotations

from perdure.core.failures import ALL_LOST_LIMIT, LOOP_LIMIT, POISON_LIMIT, Death, Failures

KILLED = Death("signal", None, 9)
ERROR = Death("exception", 1, None, "ValueError", "train.py:12")


def test_a_killed_worker_is_replaced() -> None:
    failures = Failures(1000)
    for _ in range(20):
        assert failures.judge(KILLED, reached_first_step=True).action == "replace"


def test_the_same_error_again_without_progress_is_the_scripts() -> None:
    failures = Failures(1000)
    assert failures.judge(ERROR, True).action == "replace"
    decision = failures.judge(ERROR, True)
    assert (decision.action, decision.exit_code) == ("stop", 1)
    assert "ValueError at train.py:12" in decision.message


def test_progress_or_another_place_makes_it_a_new_error() -> None:
    failures = Failures(1000)
    failures.judge(ERROR, True)
    assert failures.judge(Death("exception", 1, None, "ValueError", "train.py:13"), True).action == "replace"
    failures.progress()
    assert failures.judge(ERROR, True).action == "replace"


def test_steps_that_come_again_end_an_error_but_no_row_of_total_losses() -> None:
    failures = Failures(1000)
    for _ in range(ALL_LOST_LIMIT - 1):
        failures.judge(ERROR, True)
        assert failures.all_lost(9).action == "replace"
        failures.progress(further=False)
    failures.judge(ERROR, True)
    assert failures.all_lost(9).action == "stop"


def test_a_micro_batch_of_which_one_worker_after_the_other_ends_is_poison() -> None:
    failures = Failures(1000)
    for step in range(3):
        for _ in range(POISON_LIMIT - 1):
            assert failures.at_micro_batch(KILLED, step, 5).action == "replace"
            assert failures.at_micro_batch(KILLED, step, 6).action == "replace"
        failures.progress()
    for _ in range(POISON_LIMIT - 1):
        failures.at_micro_batch(KILLED, 3, 5)
    decision = failures.at_micro_batch(KILLED, 3, 5)
    assert (decision.action, decision.exit_code) == ("stop", 1)
    assert "10 workers, one after the other, ended at micro-batch 5 of step 3; the last" in decision.message


def test_a_newer_checkpoint_is_progress_and_the_same_one_again_is_not() -> None:
    failures = Failures(1000)
    for step in range(3 * ALL_LOST_LIMIT):
        assert failures.all_lost(99).action == "replace"
        failures.checkpoint(step)
    for _ in range(ALL_LOST_LIMIT - 1):
        assert failures.all_lost(99).action == "replace"
        failures.checkpoint(3 * ALL_LOST_LIMIT - 1)
    assert failures.all_lost(99).action == "stop"


def test_a_crash_loop_at_start_up_ends_the_run() -> None:
    failures = Failures(1000)
    decisions = [failures.judge(KILLED, False).action for _ in range(LOOP_LIMIT)]
    assert decisions == ["replace"] * (LOOP_LIMIT - 1) + ["stop"]


def test_workers_that_were_started_together_show_one_failure_of_the_start_up() -> None:
    failures = Failures(1000)
    assert {failures.judge(KILLED, False, again=False).action for _ in range(8)} == {"replace"}
    assert failures.judge(KILLED, False).action == "replace"
    assert failures.judge(KILLED, False).message == (
        "3 workers in a row ended at start-up, before job.steps began: signal 9"
    )


def test_it_is_no_loop_when_somebody_got_through() -> None:
    failures = Failures(1000)
    for _ in range(10):
        assert failures.judge(KILLED, False).action == "replace"
        failures.reached_first_step()


def test_a_lost_node_is_no_crash_loop_of_its_starting_workers() -> None:
    failures = Failures(1000)
    assert {failures.judge(Death("node", None, None), False).action for _ in range(8)} == {"replace"}


def test_the_budget_is_kept() -> None:
    failures = Failures(2)
    assert [failures.judge(KILLED, True).exit_code for _ in range(3)] == [0, 0, 3]


def test_a_refusal_is_the_users_at_once() -> None:
    decision = Failures(1000).judge(Death("exit", 4, None, message="no such file", refused=True), False)
    assert (decision.action, decision.exit_code, decision.message) == ("stop", 4, "no such file")

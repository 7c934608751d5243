"""Work dealt out after a commit: everybody gets all results, in order, whoever dies meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.core.tasks import Answer, Deal, Tasks

KEY = (3, 0)


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_all_who_ask_are_answered_alike(workers: int, count: int, data: st.DataObject) -> None:
    tasks = Tasks()
    inbox: list[Deal] = []
    answers: dict[int, Answer] = {}
    dead: set[int] = set()

    def take(out: list[Deal | Answer]) -> None:
        for thing in out:
            if isinstance(thing, Answer):
                assert thing.worker not in answers
                answers[thing.worker] = thing
            elif thing.worker not in dead:
                inbox.append(thing)

    waiting = list(range(workers))
    computed: list[int] = []
    while waiting or inbox:
        if waiting and (not inbox or data.draw(st.booleans())):
            take(tasks.ask(waiting.pop(0), KEY, count))
            continue
        deal = inbox.pop(data.draw(st.integers(0, len(inbox) - 1)))
        if len(dead) < workers - 1 and data.draw(st.booleans()):
            dead.add(deal.worker)
            inbox = [other for other in inbox if other.worker != deal.worker]
            take(tasks.lost(deal.worker))
        elif deal.worker not in dead:
            computed.append(deal.item)
            take(tasks.result(deal.worker, KEY, deal.item, {"loss": float(deal.item)}, 2.0))
    living = set(range(workers)) - dead
    assert living <= set(answers)
    for answer in answers.values():
        assert answer.values == tuple({"loss": float(item)} for item in range(count))
        assert answer.weights == (2.0,) * count
    assert sorted(computed) == list(range(count)), "no item is computed twice"


def test_one_that_asks_again_gets_what_may_have_been_lost() -> None:
    tasks = Tasks()
    assert tasks.ask(1, KEY, 1) == [Deal(1, KEY, 0)]
    assert tasks.ask(1, KEY, 1) == [Deal(1, KEY, 0)], "the deal was lost on the way"
    answer = Answer(1, KEY, ({"a": 1.0},), (1.0,))
    assert tasks.result(1, KEY, 0, {"a": 1.0}, 1.0) == [answer]
    assert tasks.ask(1, KEY, 1) == [answer], "the answer was lost on the way"


def test_old_tasks_are_forgotten() -> None:
    tasks = Tasks()
    tasks.ask(1, KEY, 1)
    tasks.ask(1, (5, 0), 1)
    assert tasks.result(1, KEY, 0, {}, 1.0) == []


def test_a_result_that_the_task_does_not_have_changes_nothing() -> None:
    tasks = Tasks()
    assert tasks.ask(1, KEY, 1) == [Deal(1, KEY, 0)]
    assert tasks.result(1, KEY, 7, {"loss": 1.0}, 1.0) == []
    (answer,) = tasks.result(1, KEY, 0, {"loss": 2.0}, 1.0)
    assert isinstance(answer, Answer)
    assert answer.values == ({"loss": 2.0},)

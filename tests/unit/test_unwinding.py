"""An exception on its way is told from `break`, by a generator that sees neither."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

import pytest

from perdure.worker.unwinding import leaver, unwinding

Loop = Callable[[], Generator[int, None, None]]
"""Made where it is run through: nothing but the loop holds it."""


def steps(seen: list[bool]) -> Generator[int, None, None]:
    for number in range(3):
        try:
            yield number
        except GeneratorExit:
            seen.append(unwinding(leaver(sys._getframe(1))))
            return


def alone(loop: Loop) -> Loop:
    return loop


def inside(loop: Loop) -> Loop:
    def around() -> Generator[int, None, None]:
        for number in loop():
            yield number + 0

    return around


def delegated(loop: Loop) -> Loop:
    def around() -> Generator[int, None, None]:
        yield from loop()

    return around


def inside_with_finally(loop: Loop) -> Loop:
    def around() -> Generator[int, None, None]:
        try:
            for number in loop():
                yield number + 0
        finally:
            len("closed")

    return around


def twice(loop: Loop) -> Loop:
    def around() -> Generator[int, None, None]:
        return (number for number in inside(loop)())

    return around


every_wrapper = pytest.mark.parametrize("wrap", [alone, inside, inside_with_finally, delegated, twice])
"""A generator around the loop's is closed at its `yield`, whatever the reason is further out."""


def fail() -> None:
    raise ValueError


def left_by_break(loop: Loop) -> None:
    for number in loop():
        if number == 1:
            break


def left_by_return(loop: Loop) -> int:
    for number in loop():
        for _ in range(2):
            if number == 1:
                return number
    return 0


def left_by_break_after_an_error(loop: Loop) -> None:
    kept = []
    for number in loop():
        try:
            fail()
        except ValueError as error:
            kept.append(error)
            if number == 1:
                break
        finally:
            pass


def closed(loop: Loop) -> None:
    generator = loop()
    next(generator)
    generator.close()


@every_wrapper
@pytest.mark.parametrize("leave", [left_by_break, left_by_return, left_by_break_after_an_error, closed])
def test_left_on_purpose(leave: Callable[[Loop], None], wrap: Callable[[Loop], Loop]) -> None:
    seen: list[bool] = []
    leave(wrap(lambda: steps(seen)))
    assert seen == [False]


def raised_below(loop: Loop) -> None:
    for _ in loop():
        fail()


def raised_here(loop: Loop) -> None:
    for _ in loop():
        raise ValueError


def raised_again(loop: Loop) -> None:
    for _ in loop():
        try:
            fail()
        except ValueError:
            raise


def raised_from(loop: Loop) -> None:
    for _ in loop():
        try:
            fail()
        except ValueError as error:
            raise ValueError from error


def raised_through_finally(loop: Loop) -> None:
    for _ in loop():
        try:
            fail()
        finally:
            pass


def raised_through_with(loop: Loop) -> None:
    with contextlib.ExitStack():
        for _ in loop():
            with contextlib.ExitStack():
                fail()


def raised_in_an_inner_loop(loop: Loop) -> None:
    for _ in loop():
        for _ in range(2):
            fail()


@every_wrapper
@pytest.mark.parametrize(
    "leave",
    [
        raised_below, raised_here, raised_again, raised_from, raised_through_finally, raised_through_with,
        raised_in_an_inner_loop,
    ],
)  # fmt: skip
def test_left_by_an_error(leave: Callable[[Loop], None], wrap: Callable[[Loop], Loop]) -> None:
    seen: list[bool] = []
    with pytest.raises(ValueError):
        leave(wrap(lambda: steps(seen)))
    assert seen == [True]


@pytest.mark.parametrize("fails", [True, False])
def test_an_error_of_the_generator_around_the_loop(fails: bool) -> None:
    seen: list[bool] = []

    def around() -> Generator[int, None, None]:
        for number in steps(seen):
            yield number
            if fails:
                fail()
            break

    with contextlib.suppress(ValueError):
        list(around())
    assert seen == [fails]


def test_an_error_that_is_caught_around_the_loop() -> None:
    seen: list[bool] = []
    with contextlib.suppress(ValueError):
        for _ in steps(seen):
            fail()
    assert seen == [True]


def test_exit() -> None:
    seen: list[bool] = []

    def leave() -> None:
        for _ in steps(seen):
            sys.exit(0)

    with pytest.raises(SystemExit):
        leave()
    assert seen == [True]

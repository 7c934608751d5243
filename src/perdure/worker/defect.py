"""A defect in one of the runtime's own threads ends the worker: it cannot be trusted any more.

An error there reaches no user code, and a worker that goes on without one of its threads would only look
alive. So it ends at once, says why, and is replaced like any other that died.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from perdure.worker import boot

EXIT = 87

_P = ParamSpec("_P")


def end(error: BaseException) -> NoReturn:
    """Print the error, tell the agent, and end this process."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    if boot.CONTEXT is not None:
        boot.CONTEXT.last_words(boot.crash(error, EXIT))
    os._exit(EXIT)


def fatal(call: Callable[_P, None]) -> Callable[_P, None]:
    """`call` for a thread of the runtime: an error that leaves it ends the worker."""

    @functools.wraps(call)
    def guarded(*args: _P.args, **keywords: _P.kwargs) -> None:
        try:
            call(*args, **keywords)
        except BaseException as error:
            end(error)

    return guarded

"""An error that can reach no user code ends the worker.

Such is a defect in one of the runtime's own threads: a worker that goes on without one would only look alive,
and cannot be trusted. So it ends at once, says why, and is replaced like any other that died. Such is also
what is wrong with the script's loop, when python is just closing that.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

from perdure.schema.errors import UsageError
from perdure.worker import boot

EXIT = 87

_P = ParamSpec("_P")


def end(error: BaseException) -> NoReturn:
    """Print the error, tell the agent, and end this process: with the code of an error in the script's use
    of perdure, else with EXIT."""
    code = error.exit_code if isinstance(error, UsageError) else EXIT
    try:
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        if boot.CONTEXT is not None:
            boot.CONTEXT.last_words(boot.crash(error, code))
    finally:  # whatever else may be wrong
        os._exit(code)


def fatal(call: Callable[_P, None]) -> Callable[_P, None]:
    """`call` for a thread of the runtime: an error that leaves it ends the worker."""

    @functools.wraps(call)
    def guarded(*args: _P.args, **keywords: _P.kwargs) -> None:
        try:
            call(*args, **keywords)
        except BaseException as error:
            end(error)

    return guarded

"""Whether a loop is left by an exception or by `break`, asked from a generator that is being closed by it.

Python closes an abandoned generator alike for both, and tells it nothing: the exception on its way is
nobody's `sys.exception()` yet. But the traceback in the making refers to the frame that it leaves, and the
frame still stands at the instruction that raised.
"""

from __future__ import annotations

import dis
import gc
import inspect
from types import FrameType, TracebackType

_RAISING = ("RAISE_VARARGS", "RERAISE")
_YIELDING = ("YIELD_VALUE", "RESUME")


def leaver(frame: FrameType) -> FrameType:
    """The frame that left the loop: generators around it are closed in turn, at their own `yield`."""
    while frame.f_code.co_flags & inspect.CO_GENERATOR and _instruction(frame) in _YIELDING:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def unwinding(frame: FrameType) -> bool:
    """Whether an exception is just leaving `frame`, or the block of it that holds the generator.

    An exception that was caught and is kept somewhere does not count. CPython 3.11 to 3.13.
    """
    if _instruction(frame) in _RAISING:
        return True
    return any(
        isinstance(found, TracebackType) and found.tb_frame is frame and found.tb_lasti == frame.f_lasti
        for found in gc.get_referrers(frame)
    )

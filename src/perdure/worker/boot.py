"""Runs the user's script in a forked worker, as python would have run it.

`CONTEXT` tells `perdure.join` that there is a launcher, and how to reach it. An error that ends the script
is printed as python prints it and told to the agent as `Crashed`, before the interpreter shuts down; exit
codes, `os._exit`, `atexit` and the flushing of streams are left to the interpreter.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib.machinery
import io
import os
import pkgutil
import runpy
import site
import socket
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import perdure
from perdure.schema.errors import PerdureError, UsageError
from perdure.schema.ids import WorkerId
from perdure.schema.messages import Crashed, Fork, Progress, WorkerMessage
from perdure.schema.plan import Record
from perdure.schema.wire import encode
from perdure.worker.lifeline import Lifeline
from perdure.worker.progress import ProgressPage

TRACEBACK_CHARS: Final = 65536
_SEND_WAIT_S = 5.0


@dataclass
class Context:
    """What a worker has from its launcher.

    `control` is a blocking stream socket to the agent that carries frames of `schema.messages`; one thread
    may read it, everyone writes through `send`. `host` is where peers reach this node, `data_key` opens
    connections between the job's workers. `unconfirmed` gives the lines of steps that this worker has
    committed and the others have not confirmed, for its last words; `in_step` says whether the script is
    inside a step, where to exit is a mistake whatever the code; `script_ended` is called when its last line
    is done.
    """

    worker: WorkerId
    node: str
    host: str
    control: socket.socket
    progress: ProgressPage
    data_key: bytes
    lifeline: Lifeline
    unconfirmed: Callable[[], tuple[Record, ...]] = tuple
    in_step: Callable[[], bool] = bool
    script_ended: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: WorkerMessage) -> None:
        """Send one whole frame; any thread. Raises OSError when the agent is gone."""
        data = encode(message)
        with self._lock:
            self.control.sendall(data)

    def doing(self) -> Progress | None:
        """What the progress page says."""
        now = self.progress.read()
        if now is None:
            return None
        phase = now.phase.name.lower()
        return Progress(self.worker, os.getpid(), phase, now.step, now.micro_batch, now.samples)

    def last_words(self, message: WorkerMessage) -> None:
        """Send from a script that is ending: never raises, and waits for no thread for long."""
        if self._lock.acquire(timeout=_SEND_WAIT_S):
            try:
                self.control.sendall(encode(message))
            except Exception as error:  # without an agent this process goes with it
                if not isinstance(error, OSError):
                    traceback.print_exc()
            finally:
                self._lock.release()


ENDING = False
"""True once an exception has left the script: a generator that is closed now was not left by `break`."""

CONTEXT: Context | None = None
"""None when the script runs alone, and in processes that the worker forks."""


def run(fork: Fork, control: socket.socket, page_fd: int) -> None:
    """Run `fork.script` as `__main__`. Call it last and at the bottom of the stack: it returns, or raises
    SystemExit or KeyboardInterrupt, to the interpreter, which then ends as it does after any script."""
    global CONTEXT, ENDING
    CONTEXT = context = Context(
        fork.worker, fork.node, fork.host, control, ProgressPage(page_fd), fork.data_key, Lifeline(page_fd)
    )
    os.close(page_fd)
    os.register_at_fork(after_in_child=_forget_launcher)
    faulthandler.enable()
    try:
        _run_script(fork.script)
        context.script_ended()
        return
    except SystemExit as error:
        code = _exit_code(error)
        if code == 0:
            context.script_ended()
        ENDING = True
        if code != 0 or context.in_step():
            context.last_words(crash(error, code))
        raise
    except BaseException as error:
        raised = error
    _end(context, raised)  # outside of `except`: an error in the script's excepthook has no context


def _forget_launcher() -> None:
    """In a process that the script forked: the socket must end with the worker, not with its children."""
    global CONTEXT
    if CONTEXT is not None:
        os.close(CONTEXT.control.detach())
        CONTEXT = None


def _run_script(script: tuple[str, ...]) -> None:
    """What `python SCRIPT ARGS` or `python -m MODULE ARGS` does after start-up."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if script[0] == "-m":
        sys.argv[:] = ["-m", *script[2:]]
        _put_first_on_path(os.getcwd())
        # The function behind `python -m`; run_module() would take the module's globals away at its end.
        runpy._run_module_as_main(script[1])  # type: ignore[attr-defined]
        return
    sys.argv[:] = script
    path = os.path.join(os.getcwd(), script[0])
    if pkgutil.get_importer(path) is not None:  # a directory or a zip file with a __main__.py
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _put_first_on_path(os.path.dirname(os.path.realpath(path)))
    vars(main).update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {path!r}: {reason}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _put_first_on_path(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _end(context: Context, error: BaseException) -> NoReturn:
    """Print `error` as python does, tell the agent, and leave the interpreter to end."""
    _drop_own_frames(error)
    code = error.exit_code if isinstance(error, PerdureError) else 1
    last_words = crash(error, code)
    _print(error)
    context.last_words(last_words)
    if isinstance(error, KeyboardInterrupt):
        # The interpreter ends the process by SIGINT, as the shell expects; it is printed already.
        sys.excepthook = lambda *_: None
        raise error
    sys.exit(code)


def _print(error: BaseException) -> None:
    if isinstance(error, UsageError):
        print(f"{_where(error)}: {error}", file=sys.stderr)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as broken:
        _drop_own_frames(broken)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


# ── what is said about an error ─────────────────────────────────────────────────────────────────────

_PERDURE = os.path.dirname(os.path.abspath(perdure.__file__))


def _drop_own_frames(error: BaseException) -> None:
    """Let the traceback begin with the script's first frame, as python's own does."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    error.__traceback__ = tb


def crash(error: BaseException, exit_code: int) -> Crashed:
    """What is told about an error that ends this worker."""
    _drop_own_frames(error)
    text = "".join(traceback.format_exception(error))
    if len(text) > TRACEBACK_CHARS:
        half = TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
    kind = type(error)
    return Crashed(
        kind=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        where=_printable(_where(error)),
        traceback=_printable(text),
        exit_code=exit_code,
        user=isinstance(error, UsageError | SyntaxError),
        doing=CONTEXT.doing() if CONTEXT is not None else None,
        records=CONTEXT.unconfirmed() if CONTEXT is not None else (),
    )


def _where(error: BaseException) -> str:
    """`file:line` of the innermost frame of the user's own code; of any frame, if none is the user's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    library = _library_paths()
    for file, line in reversed(frames):
        if not file.startswith("<") and not os.path.realpath(file).startswith(library):
            return f"{file}:{line}"
    return "{}:{}".format(*frames[-1]) if frames else ""


def _library_paths() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), _PERDURE]
    return tuple(os.path.join(os.path.realpath(path), "") for path in paths)


def _printable(text: str) -> str:
    """Without lone surrogates (they come from file names that are not UTF-8), which the wire refuses."""
    return text.encode("utf-8", "backslashreplace").decode()

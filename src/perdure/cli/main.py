"""`perdure`: parse, call, print. Each subcommand is one module, imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from perdure.schema.errors import PerdureError, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("perdure.cli.run", "train a script; any worker may die at any moment"),
    "demo": ("perdure.cli.demo", "train the example GPT, kill workers, show what was lost"),
    "ps": ("perdure.cli.ps", "show the workers of a run"),
    "report": ("perdure.cli.report", "faults, recoveries and goodput of a run"),
    "chaos": ("perdure.cli.chaos", "hit workers of a running job at random, and see whether it goes on"),
    "plan": ("perdure.cli.plan", "which job gets which nodes of a cluster"),
    "simulate": ("perdure.cli.simulate", "what a cluster loses under each recovery policy"),
}
"""name → (module with `configure(parser)` and `run(args) -> int`, one line of help)."""


class _Parser(argparse.ArgumentParser):
    """argparse with exit code 4 and one line for wrong usage.

    Options are written out: argparse looks at a script's own options too, and would take `--n` for one
    of ours that is cut short.
    """

    def __init__(self, **known: Any) -> None:
        super().__init__(**known, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        where = self.prog.removeprefix("perdure").lstrip()  # `main` puts the program's name before it
        raise UsageError(f"{where}{': ' if where else ''}{message}; see {self.prog} --help")


def _parser(names: Sequence[str]) -> _Parser:
    parser = _Parser(prog="perdure", description="Training that goes on, with the same bits, whoever dies.")
    parser.add_argument("--version", action="version", version=f"perdure {version('perdure')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name in names:
            importlib.import_module(module).configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (DESIGN §7): errors are one line on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        parsed, unknown = _parser(args[:1]).parse_known_args(args)
        if unknown:
            command = parsed.command
            raise UsageError(f"{command}: unknown {' '.join(unknown)}; see perdure {command} --help")
        module = importlib.import_module(COMMANDS[parsed.command][0])
        return int(module.run(parsed))
    except PerdureError as error:
        print(f"perdure: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _open_closed_streams() -> None:
    """Standard streams that the caller has closed (`>&-`) lead nowhere, and no file gets their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (until the end)


if __name__ == "__main__":
    sys.exit(main())

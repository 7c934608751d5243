"""One scripted run without chance, as text that a reviewer can read (after etcd-io/raft's interaction tests).

A file is a list of paragraphs: commands, a line of dashes, and what happened until the next paragraph.

    job nodes=3 blocks=3 per_step=6 until=2    what runs; see `JOB` for all words
    until w1 computes 0.2                      run until a line says so
    run 0.5                                    run for so many seconds
    crash w1 · leave w1 · slow w1 2.0 · sever w0 w1 · grow · stop · restart
    end                                        run until the job is over

`python -m perdure.sim.protocol.scenario FILE…` compares; with `--rewrite` it writes what happens now: read
the difference before you keep it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from perdure.schema.plan import Shape
from perdure.sim.protocol.faults import Fault, Pace, Schedule
from perdure.sim.protocol.simulation import Rig, Simulation
from perdure.sim.protocol.trace import Trace
from perdure.sim.protocol.world import Steady

DASHES = "----"
EVENTS_MAX = 20_000
JOB = {
    "nodes": 3,
    "workers": 1,
    "standby": 0,
    "blocks": 3,
    "per_step": 6,
    "until": 2,
    "checkpoints": 0,
    "evaluate": 0,
    "unseeded": 0,
}
QUIET = frozenset(
    {"Joined", "Welcome", "Acknowledged", "Computed", "Ledger", "HealStarted", "Healed", "Ready", "Adopted"}
)
QUIET_EVENTS = frozenset(
    {
        "worker_started",
        "first_micro_batch",
        "heal_started",
        "healed",
        "joined",
        "fault_decided",
        "fault_detected",
    }
)
PACE = Pace(
    micro_batch_s=1.0,
    commit_s=0.3,
    think_s=0.01,
    wire_s=0.02,
    control_s=0.01,
    start_s=0.5,
    retry_s=0.1,
)


class ScriptError(ValueError):
    """A command that cannot be understood or carried out."""


class Scenario:
    """Executes commands against one run."""

    def __init__(self) -> None:
        self._sim: Simulation | None = None
        self._shown = 0

    @property
    def sim(self) -> Simulation:
        """The run. Raises ScriptError before there is one."""
        if self._sim is None:
            raise ScriptError("a scenario starts with `job`")
        return self._sim

    @property
    def lines(self) -> list[str]:
        """All that was said."""
        assert self.sim.trace is not None
        return self.sim.trace.lines

    def execute(self, commands: list[str]) -> str:
        """Carry out a paragraph's commands; what happened."""
        for command in commands:
            word, *rest = command.split()
            doing: dict[str, Callable[[list[str]], None]] = {
                "job": self._job,
                "until": self._until,
                "run": self._run,
                "end": self._end,
            }
            if word in doing:
                doing[word](rest)
            else:
                self._fault(word, rest)
        new, self._shown = self.lines[self._shown :], len(self.lines)
        return "\n".join(new) if new else "ok"

    def _job(self, words: list[str]) -> None:
        options = dict(JOB)
        for word in words:
            name, _, number = word.partition("=")
            if name not in options:
                raise ScriptError(f"{word}: a job has {', '.join(JOB)}")
            options[name] = int(number)
        shape = Shape(
            per_step=options["per_step"], blocks=options["blocks"], until=options["until"], buckets=(6, 7)
        )
        schedule = Schedule(
            seed=0,
            shape=shape,
            nodes=options["nodes"],
            workers=options["workers"],
            standby=options["standby"],
            pace=PACE,
            faults=(),
            checkpoint_every=options["checkpoints"],
            seeded=not options["unseeded"],
            evaluate=bool(options["evaluate"]),
        )
        self._sim = Simulation(schedule, Rig(), Steady(), Trace(QUIET, QUIET_EVENTS))

    def _until(self, words: list[str]) -> None:
        who, what = words[0], " ".join(words[1:])
        seen = len(self.lines)

        def said() -> bool:
            return any(line[9:].startswith(f"{who} ") and what in line for line in self.lines[seen:])

        for _ in range(EVENTS_MAX):
            if said() or self.sim.world.idle or self.sim.over:
                break
            self.sim.world.step()
        if not said():
            raise ScriptError(f"nobody ever says: {who} {what}")

    def _run(self, words: list[str]) -> None:
        self.sim.world.run(self.sim.world.now + float(words[0]), lambda: self.sim.over)

    def _end(self, words: list[str]) -> None:
        self.sim.world.run(self.sim.world.now + 200.0, lambda: self.sim.over)
        if not self.sim.over:
            raise ScriptError("the job does not end")

    def _fault(self, word: str, words: list[str]) -> None:
        sim = self.sim
        workers = [sim.workers[int(name[1:])] for name in words if name[0] == "w"]
        match word:
            case "crash":
                workers[0].die()
            case "leave":
                workers[0].leave()
            case "slow":
                workers[0].slow_s = float(words[1])
            case "sever":
                sim.fabric.sever(workers[0].id, workers[1].id)
            case "grow":
                sim.grow()
            case "stop":
                sim.stop()
            case "restart":
                sim.restart()
            case _:
                raise ScriptError(f"unknown command: {word}")
        if word not in ("stop", "grow"):
            sim.faults.fired.append(Fault(word))


def play(text: str) -> str:
    """A scenario file with what its commands do now."""
    scenario = Scenario()
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        head = paragraph.split(f"\n{DASHES}", 1)[0].splitlines()
        commands = [line for line in head if line and not line.startswith("#")]
        shown = [*head]
        if commands:
            shown += [DASHES, scenario.execute(commands)]
        paragraphs.append("\n".join(shown))
    return "\n\n".join(paragraphs) + "\n"


def main(arguments: list[str]) -> int:
    """Compare or rewrite files; 1 if any differs."""
    parser = argparse.ArgumentParser(prog="python -m perdure.sim.protocol.scenario", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rewrite", action="store_true", help="write what happens now into the files")
    options = parser.parse_args(arguments)
    differ = 0
    for path in options.files:
        before = path.read_text()
        after = play(before)
        if after != before:
            differ += 1
            print(f"{path}: {'rewritten' if options.rewrite else 'differs'}")
            if options.rewrite:
                path.write_text(after)
    return int(differ > 0 and not options.rewrite)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

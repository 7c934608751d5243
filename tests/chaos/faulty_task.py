"""`train_task.py` with faults: what the chaos tests run.

    perdure run … tests/chaos/faulty_task.py TASK --steps N --digests DIR

DIR has the scenario; see `scenario` and `traps`. The notes of `train_task` get the time as a last word.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jitter
import train_task
from perdure.chaos.faults import Moment
from scenario import Scenario
from tasks import TASKS
from traps import Traps, install


class TimedDiary(train_task.Diary):
    """Lines that can be put in order across processes."""

    def write(self, *words: object) -> None:
        super().write(*words, time.monotonic_ns())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1)  # a test that waits in vain asks where everybody is
    args = train_task.parse_args()
    scenario = Scenario.read(args.digests)
    traps = Traps(scenario, args.digests)
    traps.at(Moment.START_UP, None)
    install(traps)
    if scenario.jitter:
        jitter.install(scenario.jitter)
    train_task.TASKS = {name: traps.around(task, args.steps) for name, task in TASKS.items()}
    train_task.Diary = TimedDiary  # type: ignore[misc]
    train_task.main()
    traps.at(Moment.AFTER_LAST, args.steps)  # the script's tail


if __name__ == "__main__":
    main()

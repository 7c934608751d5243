"""Runs a command so many times at once, each with its number as the last argument; starts again what ends.

python supervisor.py 4 COMMAND ARGS...
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> None:
    count, command = int(sys.argv[1]), sys.argv[2:]
    running = {(process := subprocess.Popen([*command, str(n)])).pid: (n, process) for n in range(count)}
    while True:
        pid, _ = os.wait()
        number, _ = running.pop(pid)
        process = subprocess.Popen([*command, str(number)])
        running[process.pid] = (number, process)


if __name__ == "__main__":
    main()

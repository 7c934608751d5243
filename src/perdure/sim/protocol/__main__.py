"""`python -m perdure.sim.protocol --seeds 0:1000 [--rule-off P4]`: search, and show the first finding."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from perdure.sim.protocol.mutants import MUTANTS
from perdure.sim.protocol.search import Config, run, search
from perdure.sim.protocol.simulation import Verdict
from perdure.sim.protocol.trace import Trace

EXIT_CODES = {Verdict.PASSED: 0, Verdict.CRASH: 10, Verdict.LIVENESS: 11, Verdict.CORRECTNESS: 12}


def main(arguments: list[str]) -> int:
    """Search; the exit code tells the kind of the first finding."""
    parser = argparse.ArgumentParser(prog="python -m perdure.sim.protocol", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:LAST (excluded), or one seed to be traced")
    parser.add_argument("--findings", type=int, default=1, help="stop after so many findings")
    parser.add_argument("--rule-off", choices=MUTANTS, help="break a rule: the search must find the fault")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    config = MUTANTS[options.rule_off].config() if options.rule_off else Config()
    config = replace(config, findings_max=options.findings)
    if not last:
        return _show(int(first), config)
    findings = search(range(int(first), int(last)), config)
    print(findings)
    return _show(findings.found[0].seed, config) if findings.found else 0


def _show(seed: int, config: Config) -> int:
    trace = Trace()
    outcome = run(seed, config, trace)
    print(trace)
    print(f"seed {seed}: {outcome.verdict.value} {outcome.detail}")
    return EXIT_CODES[outcome.verdict]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Each rule is needed: with it switched off the search finds a fault, with it on the same schedule passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.sim.protocol.mutants import MUTANTS
from perdure.sim.protocol.search import run, search
from perdure.sim.protocol.simulation import Rig, Verdict

NEEDED = {*(f"P{n}" for n in range(1, 8)), "P9", "P12", *(f"P{n}" for n in range(14, 19))}


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS.values()} >= NEEDED


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_the_rule_switched_off(name: str) -> None:
    mutant = MUTANTS[name]
    findings = search(range(mutant.seeds), mutant.config())
    assert findings.found, f"{mutant.rule} can be left out: {findings}"
    sound = run(findings.found[0].seed, replace(mutant.config(), rig=Rig()))
    assert sound.verdict is Verdict.PASSED, "the production parts fail in that run too"

"""Scenarios as text: what happens, message by message, where a reviewer can read it.

After a change that is understood: python -m perdure.sim.protocol.scenario --rewrite FILE…
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.sim.protocol.scenario import Scenario, ScriptError, main, play

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    assert play(path.read_text()) == path.read_text(), (
        f"{path.name} differs; read the change, then rewrite it"
    )


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 12


def test_a_command_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ScriptError, match="starts with `job`"):
        Scenario().execute(["crash w0"])
    with pytest.raises(ScriptError, match="unknown command: explode"):
        Scenario().execute(["job nodes=1 until=1", "explode"])
    with pytest.raises(ScriptError, match="nobody ever says"):
        Scenario().execute(["job nodes=1 until=1", "until w0 sings"])


def test_rewriting_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("job nodes=1 blocks=1 per_step=1 until=1\nend\n")
    assert main([str(path)]) == 1
    assert "----" not in path.read_text()
    assert main(["--rewrite", str(path)]) == 0
    assert "Finished step 0" in path.read_text()
    assert main([str(path)]) == 0

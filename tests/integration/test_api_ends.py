"""How a job begins, ends, and goes on: no steps, more steps, other workers, anew; and crashes in the tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from launched import expect, run
from perdure.core.heals import CAUSE
from test_api_exact import SCRIPT, judged


def test_a_job_goes_on_with_more_steps_and_other_workers_or_anew(tmp_path: Path) -> None:
    words = [SCRIPT, "gpt", "--notes", tmp_path, "--blocks", 4]
    none = run(tmp_path, *words, "--steps", 0, options=["--nproc-per-node", 2])
    assert none.steps() == []
    assert none.printed.count("tail of") == 2
    first = run(tmp_path, *words, "--steps", 3, options=["--nproc-per-node", 3])
    assert first.steps() == [0, 1, 2]
    more = run(tmp_path, *words, "--steps", 5, options=["--nproc-per-node", 1])
    assert more.steps() == [0, 1, 2, 3, 4]
    assert {line["workers"] for line in more.metrics()} == {1, 3}
    fewer = run(tmp_path, *words, "--steps", 2, options=["--nproc-per-node", 1])
    assert fewer.steps() == [0, 1, 2, 3, 4]  # there was nothing to do
    expect(tmp_path, judged("gpt", steps=5))
    anew = tmp_path / "anew"
    anew.mkdir()
    fresh = run(
        tmp_path, *words[:2], "--notes", anew, "--blocks", 2, "--steps", 2,
        options=["--nproc-per-node", 1, "--fresh"],
    )  # fmt: skip
    assert fresh.steps() == [0, 1]
    logs = {path.name for path in (fresh.run_dir / "logs").iterdir()}
    assert logs == {"worker-0.out", "worker-0.err", "zygote.log"}  # the three workers' of before are gone
    expect(anew, judged("gpt", steps=2, blocks=2))


OTHER_DATA = """
import sys, torch, perdure
until, batch_size, seed = map(int, sys.argv[1:])
job = perdure.join(seed=seed)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
for step in job.steps(perdure.MicroBatches(data, batch_size, 2), until=until):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_checkpoint_was_written_with_and_is_another_now_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OTHER_DATA)
    run(tmp_path, script, 2, 4, 0)
    same = run(tmp_path, script, 3, 4, 0)
    assert "written with" not in same.printed
    other = run(tmp_path, script, 4, 8, 1)
    text = (
        "seed 0, now 1, batch_size 4, now 8, the seed of MicroBatches 0, now 1: bits are others from here on"
    )
    assert f"perdure: that one was written with {text}" in other.printed


@pytest.mark.parametrize("how", ["raise", "kill", "exit"])
def test_a_crash_in_the_tail_is_mended_by_running_it_again(how: str, tmp_path: Path) -> None:
    """P17: by one worker, the others having ended well; nothing is trained again."""
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 2, "--steps", 3, "--tail", how,
        options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.steps() == [0, 1, 2]
    assert launched.printed.count("tail of") == 3
    assert "step 2 is the last committed one" in launched.printed
    assert len(launched.events("fault_detected")) == 1
    expect(tmp_path, judged("mlp", steps=3, blocks=2))


def test_state_that_is_not_protected_is_found_out_and_named(tmp_path: Path) -> None:
    """E14: two joiners in a row differ after their first step."""
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 2, "--steps", 100_000, "--pace-ms", 10,
        "--unprotected", "--kill", "3:5", code=1, options=["--nproc-per-node", 2],
    )  # fmt: skip
    assert launched.printed.count(CAUSE) == 1
    kinds = [(fault["worker"], fault["kind"]) for fault in launched.events("fault_detected")]
    assert [kind for _, kind in kinds] == ["signal", "corrupt", "corrupt"]
    assert kinds[1][0] != kinds[2][0]


def test_a_donor_whose_memory_goes_wrong_is_found_out_and_replaced(tmp_path: Path) -> None:
    """P8, P14: the joiner may have taken the wrong bit or not; nobody commits with it."""
    launched = run(
        tmp_path, SCRIPT, "mlp", "--notes", tmp_path, "--blocks", 4, "--steps", 60, "--pace-ms", 20,
        "--kill", "3:5", "--flip", 3, options=["--nproc-per-node", 4],
    )  # fmt: skip
    assert (tmp_path / "flip.struck").exists()
    assert launched.steps() == list(range(60))
    kinds = [fault["kind"] for fault in launched.events("fault_detected")]
    assert kinds[:2] == ["signal", "corrupt"]
    assert set(kinds[1:]) == {"corrupt"}
    expect(tmp_path, judged("mlp", steps=60))


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_error_in_the_data_set_is_a_fault_once_and_the_scripts_error_twice(
    loaders: int, tmp_path: Path
) -> None:
    words = [SCRIPT, "flaky", "--notes", tmp_path, "--blocks", 2, "--steps", 3, "--num-workers", loaders]
    (tmp_path / "loose").touch()
    once = run(tmp_path, *words, options=["--nproc-per-node", 2])
    assert once.steps() == [0, 1, 2]
    [fault] = once.events("fault_detected")
    assert fault["kind"] == "exception"
    assert "sample 142 could not be read" in fault["message"]
    expect(tmp_path, judged("flaky", steps=3, blocks=2))
    (tmp_path / "broken").touch()
    always = run(tmp_path, *words, name="again", code=1, options=["--nproc-per-node", 2])
    assert "sample 142 could not be read" in always.printed
    assert "again without progress: an error of the script" in always.printed

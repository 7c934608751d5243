"""Several nodes on one machine: launchers that meet at an address, on processes of their own."""

from __future__ import annotations

import re
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launched import Launched, expect, launch, run
from test_api_exact import judged

SCRIPT = Path(__file__).parent.parent / "train_task.py"
STEPS = 100_000
"""More than any test here waits for."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_of(pid: int) -> int:
    """Where a worker's peers connect."""
    [port] = [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"]
    return int(port)


class Nodes:
    """Starts launchers of one job, which goes on until it is told to stop; each has a run directory."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.secret = directory / "secret"
        self.port = free_port()
        self._stack = stack

    def start(
        self,
        name: str,
        workers: int,
        *,
        nnodes: str = "2",
        blocks: int = 4,
        task: str = "mlp",
        steps: int = STEPS,
    ) -> Launched:
        where = f"127.0.0.1:{self.port}"
        options = ["--nproc-per-node", workers, "--nnodes", nnodes, "--coordinator", where]
        return self._stack.enter_context(
            launch(
                self.directory, SCRIPT, task, "--steps", steps, "--blocks", blocks, "--compute-ms", 30,
                "--digests", self.directory, options=[*options, "--secret", self.secret], name=name,
            )
        )  # fmt: skip

    def binder(self, workers: int, **keywords: Any) -> Launched:
        """The first launcher, serving."""
        first = self.start("first", workers, **keywords)
        first.until(lambda: first.events("run_started"))
        return first

    def finish(self, *launchers: Launched, blocks: int = 4) -> None:
        """Stop the job at a boundary; every step of it must have the judge's bits."""
        launchers[0].signal(signal.SIGTERM)
        for launched in launchers:
            assert launched.wait() == 143, launchers[0].story()
        steps = launchers[0].steps()
        assert steps == list(range(len(steps)))
        expect(self.directory, judged("mlp", steps=len(steps), blocks=blocks))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def nodes_of(launched: Launched) -> set[str]:
    return {row.node for row in launched.active()}


def goes_on(launched: Launched, steps: int = 3) -> None:
    """Wait for some more steps."""
    before = len(launched.steps())
    launched.until(lambda: len(launched.steps()) >= before + steps)


def test_two_nodes_form_one_job_and_the_second_dies(nodes: Nodes) -> None:
    first = nodes.binder(2)
    assert stat.S_IMODE(nodes.secret.stat().st_mode) == 0o600
    assert not first.events("worker_started")  # two nodes were asked for
    first.until(lambda: "perdure: waiting for 1 more node" in first.printed)
    second = nodes.start("second", 2)
    first.until(lambda: len(first.active()) == 4)
    goes_on(first)
    assert len(nodes_of(first)) == 2
    second.end()
    first.until(lambda: len(first.active()) == 2)
    goes_on(first)
    assert {fault["kind"] for fault in first.events("fault_detected")} == {"node"}
    assert {fault["detected_by"] for fault in first.events("fault_detected")} == {"lease"}
    assert not (second.run_dir / "metrics.jsonl").exists()
    nodes.finish(first)


def test_a_job_grows_by_a_node_that_comes_later_and_again(nodes: Nodes) -> None:
    """More workers than blocks in the end: those without one compute leaves."""
    first = nodes.binder(1, nnodes="1:2", blocks=2)
    goes_on(first)
    second = nodes.start("second", 2, nnodes="1:2", blocks=2)
    first.until(lambda: len(first.active()) == 3)
    goes_on(first)
    assert "1 worker is training, this node brings 2 more" in second.printed
    assert re.search(r"^perdure: node \S+ joins with 2 workers$", first.printed, re.MULTILINE)
    options = ("--nnodes", "1:2", "--coordinator", f"127.0.0.1:{nodes.port}", "--secret", nodes.secret)
    fresh = run(nodes.directory, SCRIPT, options=[*options, "--fresh"], name="fresh", code=4)
    assert "--fresh: the job at" in fresh.printed
    assert "is training already; leave --fresh out to join it" in fresh.printed
    second.end()
    first.until(lambda: len(first.active()) == 1)
    third = nodes.start("second", 1, nnodes="1:2", blocks=2)
    first.until(lambda: len(first.active()) == 2)
    goes_on(first)
    assert {line["workers"] for line in first.metrics()} == {1, 2, 3}
    nodes.finish(first, third, blocks=2)


def test_a_node_that_was_started_wrongly_is_turned_away_and_the_job_goes_on(nodes: Nodes) -> None:
    first = nodes.binder(1, nnodes="1:2", blocks=2)
    goes_on(first)
    other = nodes.start("other", 1, nnodes="1:2", blocks=2, steps=STEPS - 1)
    assert other.wait() == 4, other.story()
    assert (
        "until is 99999, not 100000; start it with the script and arguments of the other nodes"
        in other.printed
    )
    goes_on(first)
    broken = nodes.start("broken", 1, nnodes="1:2", blocks=2, task="none")
    assert broken.wait() == 1, broken.story()
    assert "3 workers in a row ended here before they had done a step" in broken.printed
    assert len(re.findall(r"node \S+ is turned away", first.printed)) == 2
    goes_on(first)
    nodes.finish(first, blocks=2)


def test_the_binder_dies_and_comes_back_while_the_other_nodes_workers_live_on(nodes: Nodes) -> None:
    first = nodes.binder(1)
    second = nodes.start("second", 2)
    first.until(lambda: len(first.active()) == 3)
    goes_on(first)
    there = first.rows()[-1].node
    living = {row.pid for row in first.active() if row.node == there}
    first.end()
    again = nodes.start("first", 1)
    again.until(lambda: len(again.active()) == 3)
    goes_on(again)
    assert len(living) == 2
    assert living <= {row.pid for row in again.active()}
    opened = [event["generation"] for event in again.events("generation_opened")]
    assert [generation.split(".")[0] for generation in opened][0 :: len(opened) - 1] == ["1", "2"]
    assert len(opened) == len(set(opened))
    nodes.finish(again, second)
    said = "the coordinator at 127.0.0.1:\\d+ is (out of reach; trying for|back)"
    assert re.findall(f"^perdure: {said}", second.printed, re.MULTILINE) == [
        "out of reach; trying for",
        "back",
    ]
    assert "perdure: signal 15: finishing the step and saving" in second.printed


def test_strangers_and_other_secrets_are_refused_and_change_nothing(nodes: Nodes) -> None:
    first = nodes.binder(2, nnodes="1:2")
    goes_on(first)
    ports = {nodes.port, *(port_of(row.pid) for row in first.active())}
    assert len(ports) == 3
    for port in ports:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            with suppress(ConnectionResetError):
                assert stranger.recv(1000) == b""
    other = nodes.directory / "other"
    other.mkdir()
    wrong = run(
        other, SCRIPT, "mlp", "--digests", other, code=4,
        options=["--nnodes", "1:2", "--coordinator", f"127.0.0.1:{nodes.port}", "--secret", other / "secret"],
    )  # fmt: skip
    assert "refused this secret; give every node the same --secret file" in wrong.printed
    goes_on(first)
    reasons = [event["message"] for event in first.events("refused")]
    assert any("does not speak perdure's wire" in reason for reason in reasons)
    assert any("does not know the secret" in reason for reason in reasons)
    assert sum("does not speak this protocol" in reason for reason in reasons) == 2
    assert not first.events("fault_detected")
    nodes.finish(first)


def test_a_secret_that_others_may_read_is_refused(nodes: Nodes) -> None:
    nodes.secret.write_text("x" * 40)
    nodes.secret.chmod(0o644)
    launched = nodes.start("first", 1)
    assert launched.wait() == 4
    assert "chmod 600" in launched.printed

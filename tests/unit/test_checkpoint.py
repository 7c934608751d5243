"""Checkpoints.

Read back bit for bit, refused when damaged, and the older one survives whatever ends the writer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from limits import no_file_longer_than
from perdure.schema.errors import ProtocolError, RestoreError
from perdure.state import checkpoint, shelf
from perdure.state.capture import ProtectedState
from perdure.state.shelf import (
    FileSum,
    Manifest,
    Meta,
    Shelf,
    encode_manifest,
    publish,
    publish_save,
    read_manifest,
    verify,
)


def script(seed: int) -> dict[str, Any]:
    """Tied weights, channels last, a dtype that safetensors lacks, optimizer and scheduler in mid-course."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
    model[2].weight = model[0].weight
    model.add_module("conv", nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    model.register_buffer("pair", torch.randn(2, dtype=torch.complex128))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("none", torch.empty(0))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its best loss is infinity
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def write(state: ProtectedState, box: Shelf, step: int) -> Path:
    """One checkpoint, written and published."""
    meta = Meta(step=step, digest=state.digest(), blocks=4, per_step=16, seed=0)
    checkpoint.write(state.snapshot(), box.partial(step), meta)
    return box.publish(box.partial(step))


@pytest.fixture
def box(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def state() -> ProtectedState:
    return ProtectedState(script(0))


def test_a_state_comes_back_bit_for_bit(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 99)
    assert path.name == "step-000000099"
    assert sorted(file.name for file in path.iterdir()) == sorted([shelf.TENSORS, shelf.REST, shelf.MANIFEST])
    fresh = ProtectedState(script(5))
    meta = checkpoint.restore(fresh, path)
    assert fresh.digest() == state.digest() == meta.digest
    assert (meta.step, meta.blocks, meta.per_step, meta.seed) == (99, 4, 16, 0)
    assert box.newest_good() == (path, [])


def test_an_untrained_script_takes_the_optimizer_state_too(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    target = script(5)
    target["optimizer"].state.clear()
    fresh = ProtectedState(target)
    checkpoint.restore(fresh, path)
    box.clear()  # what was restored does not live in the file
    assert fresh.digest() == state.digest()


def test_any_tool_can_open_the_tensors(state: ProtectedState, box: Shelf) -> None:
    found = load_file(write(state, box, 1) / shelf.TENSORS)
    for entry in state.tensors():
        tensor = found[entry.name]
        if entry.spec.dtype == "complex128":
            assert tensor.dtype is torch.uint8
        elif not entry.spec.stride:
            assert torch.equal(tensor, entry.tensor)
    assert found.keys() == {entry.name for entry in state.tensors()}


def test_a_copy_that_is_not_the_committed_state_is_not_written(state: ProtectedState, box: Shelf) -> None:
    meta = Meta(step=1, digest="0" * 32, blocks=1, per_step=1, seed=0)
    with pytest.raises(ProtocolError, match="the copy for step 1 has the digest"):
        checkpoint.write(state.snapshot(), box.partial(1), meta)
    assert not box.directory.exists()


# --- damage -------------------------------------------------------------------------------------------------


def truncated(path: Path, name: str) -> None:
    os.truncate(path / name, (path / name).stat().st_size - 1)


def longer(path: Path, name: str) -> None:
    with open(path / name, "ab") as file:
        file.write(b"\n")


def missing(path: Path, name: str) -> None:
    (path / name).unlink()


def emptied(path: Path, name: str) -> None:
    os.truncate(path / name, 0)


def garbage(path: Path, name: str) -> None:
    (path / name).write_bytes(os.urandom(300))


def a_directory(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()


@pytest.mark.parametrize("damage", [truncated, longer, missing, emptied, garbage, a_directory])
@pytest.mark.parametrize("name", [shelf.TENSORS, shelf.REST, shelf.MANIFEST])
def test_damage_is_refused_and_the_previous_one_used(
    state: ProtectedState, box: Shelf, name: str, damage: Callable[[Path, str], None]
) -> None:
    good, bad = write(state, box, 1), write(state, box, 2)
    damage(bad, name)
    found, [refused] = box.newest_good()
    assert found == good
    assert refused.path == bad
    assert name in refused.reason
    assert "\n" not in refused.reason
    with pytest.raises(RestoreError, match=rf"checkpoint .*step-000000002: {refused.reason[:20]}"):
        checkpoint.load(bad)


@pytest.mark.parametrize("name", [shelf.REST, shelf.MANIFEST])
def test_a_flipped_bit_is_found_wherever_it_is(state: ProtectedState, box: Shelf, name: str) -> None:
    path = write(state, box, 1)
    file = path / name
    whole = file.read_bytes()
    stride = max(1, len(whole) * 8 // 1500) | 1  # odd, so that every bit of a byte has its turn
    for bit in range(0, len(whole) * 8, stride):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert verify(path) is not None, f"bit {bit} of {name}"
    file.write_bytes(whole)
    assert verify(path) is None


def test_flipped_bits_of_the_tensors_are_found(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    file = path / shelf.TENSORS
    whole = file.read_bytes()
    for place in range(0, len(whole), 37):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert verify(path) == f"{shelf.TENSORS} has the wrong checksum"


def forge(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """A manifest that is sound in itself."""
    (path / shelf.MANIFEST).write_bytes(encode_manifest(change(read_manifest(path))))


def resummed(path: Path, name: str, data: bytes) -> None:
    """A file changed together with its checksum, as a defect of the writer would leave it."""
    (path / name).write_bytes(data)
    sums = {file: shelf.sum_file(path / file) for file in (shelf.TENSORS, shelf.REST)}
    forge(path, lambda manifest: msgspec.structs.replace(manifest, files=sums))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda m: msgspec.structs.replace(m, format=2),
            "it has format 2; this version of perdure reads format 1",
        ),
        (lambda m: msgspec.structs.replace(m, files={}), "lists \\[\\]"),
        (lambda m: msgspec.structs.replace(m, files={**m.files, "../x": FileSum(0, "")}), "lists \\['../x'"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    state: ProtectedState, box: Shelf, change: Callable[[Manifest], Manifest], reason: str
) -> None:
    path = write(state, box, 1)
    forge(path, change)
    with pytest.raises(RestoreError, match=reason):
        checkpoint.load(path)


def test_files_that_disagree_although_their_sums_fit_are_refused(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    other = ProtectedState({"model": nn.Linear(2, 2)})
    resummed(path, shelf.REST, msgspec.json.encode(other.description()))
    with pytest.raises(RestoreError, match="disagree about"):
        checkpoint.load(path)
    resummed(path, shelf.REST, b'{"format":1}')
    with pytest.raises(RestoreError, match="missing required field"):
        checkpoint.load(path)
    resummed(path, shelf.TENSORS, b"\xff" * 64)
    with pytest.raises(RestoreError, match="checkpoint"):
        checkpoint.load(path)


def test_a_state_with_another_digest_than_the_manifest_says_is_refused(
    state: ProtectedState, box: Shelf
) -> None:
    path = write(state, box, 1)
    forge(path, lambda m: msgspec.structs.replace(m, meta=msgspec.structs.replace(m.meta, digest="0" * 32)))
    with pytest.raises(RestoreError, match="instead of 0000"):
        checkpoint.restore(ProtectedState(script(5)), path)


def test_another_script_is_refused_with_the_path(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    with pytest.raises(RestoreError, match=r"checkpoint .*step-000000001: .* this script protects model$"):
        checkpoint.restore(ProtectedState({"model": nn.Linear(2, 2)}), path)


def test_names_are_part_of_what_is_checked(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    moved = path.rename(path.with_name("step-000000007"))
    assert box.newest_good()[1][0].reason == "its name does not fit its step 1"
    assert verify(moved) is None  # a place that the user named is anyone's
    assert verify(moved.rename(box.partial(7))) == "it is unfinished: its writing was interrupted"
    assert verify(box.final(8)) == "there is no such directory"
    assert box.newest_first() == []


# --- publish and prune --------------------------------------------------------------------------------------


def test_the_newest_good_two_are_kept(state: ProtectedState, box: Shelf) -> None:
    paths = [write(state, box, step) for step in (1, 2, 3, 4, 5)]
    (box.directory / "notes.txt").touch()
    truncated(paths[4], shelf.TENSORS)
    truncated(paths[2], shelf.REST)
    box.partial(6).mkdir()
    box.partial(7, "w3").mkdir()
    box.partial(7, "w3.2").mkdir()
    box.partial(7, "w13").mkdir()
    assert set(box.prune(keep=2, leftovers=False)) == {paths[0], paths[2], paths[4]}
    box.discard("w3")
    assert sorted(path.name for path in box.directory.iterdir()) == [
        "notes.txt", "step-000000002", "step-000000004", "step-000000006.partial",
        "step-000000007-w13.partial",
    ]  # fmt: skip
    assert set(box.prune(keep=2)) == {box.partial(6), box.partial(7, "w13")}


def test_bad_ones_stay_while_there_is_no_good_one(state: ProtectedState, box: Shelf) -> None:
    paths = [write(state, box, step) for step in (1, 2)]
    for path in paths:
        truncated(path, shelf.MANIFEST)
    assert box.prune() == []
    assert box.newest_good()[0] is None
    assert len(box.newest_good()[1]) == 2
    assert Shelf(box.directory / "nowhere").prune() == []


def test_publishing_over_an_old_one_replaces_it(state: ProtectedState, box: Shelf) -> None:
    first = write(state, box, 1)
    truncated(first, shelf.TENSORS)
    assert write(state, box, 1) == first
    assert verify(first) is None
    assert list(box.directory.iterdir()) == [first]


def test_what_is_no_checkpoint_is_not_replaced(state: ProtectedState, box: Shelf) -> None:
    partial, target = box.directory / "x.partial", box.directory / "x"
    box.directory.mkdir(exist_ok=True)
    partial.mkdir()
    target.write_text("somebody's")
    with pytest.raises(OSError, match="it is a file that is no checkpoint"):
        publish_save(partial, target, lambda _: True)
    assert target.read_text() == "somebody's"


def test_a_save_clears_away_what_the_dead_left_and_not_what_others_write(tmp_path: Path) -> None:
    names = [shelf.aside(tmp_path / "x", f"w{number}") for number in (1, 2, 3)]
    other = shelf.aside(tmp_path / "x.y", "w1")
    for path in (*names, other):
        path.mkdir()
    publish_save(names[0], tmp_path / "x", lambda writer: writer in ("w1", "w3"))
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "x", names[1], other])


def test_where_names_cannot_be_exchanged_two_renames_do(
    state: ProtectedState, box: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(state, box, 1)
    monkeypatch.setattr(shelf.ctypes, "CDLL", lambda *_, **__: object())
    truncated(first, shelf.TENSORS)
    assert write(state, box, 1) == first
    assert verify(first) is None
    assert list(box.directory.iterdir()) == [first]


def test_publishing_what_is_not_there_changes_nothing(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    with pytest.raises(FileNotFoundError):
        publish(box.partial(1), path)
    assert verify(path) is None


def test_clear_leaves_nothing_to_go_on_from(state: ProtectedState, box: Shelf) -> None:
    write(state, box, 1)
    box.partial(2).mkdir()
    (box.directory / "notes.txt").touch()
    box.clear()
    assert [path.name for path in box.directory.iterdir()] == ["notes.txt"]


# --- a writer that dies, a disk that is full ----------------------------------------------------------------

VICTIM = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from perdure.state import checkpoint
from perdure.state.capture import ProtectedState
from perdure.state.shelf import Meta, Shelf

root = Path(sys.argv[1])
torch.manual_seed(0)
state = ProtectedState({"model": torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])})
copy, digest = state.snapshot(), state.digest()

def attempt(box, step, fatal):
    # Write and publish; end as a power cut would at the stage number `fatal`.
    passed = []
    def at(stage):
        passed.append(stage)
        if len(passed) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.write(copy, box.partial(step), Meta(step, digest, 1, 1, 0), at)
    at("published")
    box.publish(box.partial(step))

fatal = 1
while True:
    box = Shelf(root / str(fatal))
    attempt(box, 1, 0)
    child = os.fork()
    if child == 0:
        attempt(box, 2, fatal)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
    assert os.WTERMSIG(status) == signal.SIGKILL
    fatal += 1
"""


def test_a_writer_killed_at_any_stage_leaves_the_previous_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    attempts = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(attempts) > 12
    for directory in attempts[:-1]:
        box = Shelf(directory)
        assert box.newest_good() == (box.final(1), []), directory.name
        assert verify(box.partial(2)) is not None
        assert box.prune() == [box.partial(2)]
        assert list(directory.iterdir()) == [box.final(1)]
    last = Shelf(attempts[-1])
    assert last.newest_good() == (last.final(2), [])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_full_disk_is_an_error_that_harms_nothing(state: ProtectedState, box: Shelf, share: float) -> None:
    path = write(state, box, 1)
    longest = max(file.stat().st_size for file in path.iterdir())
    copied, meta = state.snapshot(), msgspec.structs.replace(read_manifest(path).meta, step=2)
    with (
        no_file_longer_than(int(longest * share)),
        pytest.raises(OSError, match=r"File too large.*step-000000002"),
    ):
        checkpoint.write(copied, box.partial(2), meta)
    assert list(box.directory.iterdir()) == [path]
    assert verify(path) is None
    checkpoint.write(copied, box.partial(2), meta)
    assert box.publish(box.partial(2)) == box.final(2)


def test_an_interrupted_write_of_the_same_step_is_written_anew(state: ProtectedState, box: Shelf) -> None:
    path = write(state, box, 1)
    shutil.copytree(path, box.partial(2))
    (box.partial(2) / "leftover").touch()
    assert sorted(file.name for file in write(state, box, 2).iterdir()) == sorted(
        [shelf.TENSORS, shelf.REST, shelf.MANIFEST]
    )


def test_the_shelf_needs_no_torch() -> None:
    code = "import sys, perdure.state.shelf; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

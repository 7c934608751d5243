"""A state on its way: every byte in one chunk, from any donor, in any order; sessions kept apart (P14)."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perdure.schema.errors import ProtocolError, RestoreError
from perdure.state.capture import ProtectedState
from perdure.state.layout import TensorSpec
from perdure.state.memory import flat_bytes, view_of
from perdure.state.transfer import Chunk, Donor, Receiver, Session, chunks

CHUNK = 512


def spec(number: int, nbytes: int) -> TensorSpec:
    return TensorSpec(f"t{number:04d}", "uint8", (nbytes,), (), nbytes, "cpu")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 2000))
def test_every_byte_is_in_exactly_one_chunk(sizes: list[int], chunk_bytes: int) -> None:
    cut = chunks([spec(number, size) for number, size in enumerate(sizes)], chunk_bytes)
    assert [chunk.index for chunk in cut] == list(range(len(cut)))
    covered = [bytearray(size) for size in sizes]
    for chunk in cut:
        assert 0 < chunk.length <= chunk_bytes
        assert chunk.length == sum(piece.length for piece in chunk.pieces)
        for piece in chunk.pieces:
            for place in range(piece.offset, piece.offset + piece.length):
                covered[piece.tensor][place] += 1
    assert all(set(counts) <= {1} for counts in covered)


def test_small_tensors_travel_together_and_large_ones_without_a_copy() -> None:
    cut = chunks([spec(0, 4), spec(1, 4), spec(2, 3000), spec(3, 4)], 1024)
    assert [[piece.tensor for piece in chunk.pieces] for chunk in cut] == [[0, 1, 3], [2], [2], [2]]
    with pytest.raises(ProtocolError, match="cannot carry anything"):
        chunks([], 0)


def script(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(6, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "generator": torch.Generator().manual_seed(seed)}


def donors(count: int, step: int = 3) -> list[Donor]:
    """Donors with equal states, as replicas have."""
    states = [ProtectedState(script(0, step)) for _ in range(count)]
    session = Session(step, states[0].digest())
    return [Donor(state, session, CHUNK) for state in states]


def carry(donor: Donor, receiver: Receiver, chunk: Chunk) -> None:
    """One chunk, as a socket would carry it: the views' bytes one after the other into the buffer."""
    views, buffer = donor.read_views(donor.session, chunk.index), receiver.buffer(donor.session, chunk.index)
    assert views is not None
    assert buffer is not None
    sent = b"".join(views)
    assert len(sent) == len(buffer) == chunk.length
    buffer[:] = sent
    assert receiver.landed(donor.session, chunk.index)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("steps", [0, 1], ids=["no optimizer state yet", "optimizer state here"])
def test_a_joiner_takes_the_state_from_several_donors_at_once(staged: bool, steps: int) -> None:
    group = donors(3)
    joiner = ProtectedState(script(9, steps))
    receiver = Receiver(joiner, chunk_bytes=CHUNK)
    receiver.begin(group[0].session, group[1].description, staged=staged)
    wanted = receiver.missing()
    assert len(wanted) == len(group[0]) > 10
    random.Random(0).shuffle(wanted)
    threads = [
        threading.Thread(target=lambda d=donor, part=wanted[n::3]: [carry(d, receiver, c) for c in part])
        for n, donor in enumerate(group)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert receiver.missing() == []
    assert receiver.finish() == group[0].session.digest == joiner.digest()


def test_staged_bytes_touch_nothing_before_the_digest_was_checked() -> None:
    [donor] = donors(1)
    joiner = ProtectedState(script(9, 1))
    before = joiner.digest()
    receiver = Receiver(joiner, chunk_bytes=CHUNK)
    receiver.begin(donor.session, donor.description)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert joiner.digest() == before
    receiver.finish()
    assert joiner.digest() == donor.session.digest


def test_direct_bytes_land_in_the_live_tensors() -> None:
    [donor] = donors(1)
    target = script(9, 1)
    weight = target["model"][0].weight
    address = weight.data_ptr()
    receiver = Receiver(ProtectedState(target), chunk_bytes=CHUNK)
    receiver.begin(donor.session, donor.description, staged=False)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert torch.equal(weight, script(0, 3)["model"][0].weight)
    receiver.finish()
    assert target["model"][0].weight is weight
    assert weight.data_ptr() == address


def test_parameters_are_read_where_they_lie() -> None:
    source = script(0, 1)
    donor = Donor(ProtectedState(source), Session(1, ""), 1 << 20)
    [views] = [donor.read_views(donor.session, index) for index in range(len(donor))]
    assert views is not None
    addresses = {torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views}
    assert source["model"][0].weight.data_ptr() in addresses
    assert source["optimizer"].state[source["model"][0].weight]["exp_avg"].data_ptr() in addresses


def test_what_a_forward_pass_changes_is_given_as_it_was() -> None:
    source = script(0, 2)
    state = ProtectedState(source)
    donor = Donor(state, Session(2, state.digest()), CHUNK)
    source["model"](torch.randn(6, 20))  # the donor computes its next step: BatchNorm's buffers move
    torch.rand(3, generator=source["generator"])
    receiver = Receiver(ProtectedState(script(9, 0)), chunk_bytes=CHUNK)
    receiver.begin(donor.session, donor.description)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert receiver.finish() == donor.session.digest != state.digest()


def test_what_a_forward_pass_replaces_is_given_as_it_was_and_modes_too() -> None:
    source, target = script(0, 2), script(9, 0)
    norm = source["model"][1]
    state = ProtectedState(source)
    home, committed = norm.running_mean, norm.running_mean.clone()
    norm.running_mean = torch.full_like(home, 7.0)
    norm.eval()  # the loop has come so far in the next step
    slot = (id(norm), "running_mean")
    donor = Donor(state, Session(2, ""), CHUNK, {slot: (home, committed)})
    receiver = Receiver(ProtectedState(target), chunk_bytes=CHUNK)
    receiver.begin(donor.session, donor.description)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    receiver.finish(donor.digest())
    assert torch.equal(target["model"][1].running_mean, committed)
    assert target["model"][1].training


def test_chunks_of_another_session_are_thrown_away() -> None:
    [old], [new] = donors(1, step=2), donors(1, step=3)
    receiver = Receiver(ProtectedState(script(9, 0)), chunk_bytes=CHUNK)
    assert receiver.missing() == []
    assert receiver.buffer(old.session, 0) is None
    receiver.begin(old.session, old.description)
    carry(old, receiver, receiver.missing()[0])
    receiver.begin(new.session, new.description)
    assert len(receiver.missing()) == len(new)
    assert receiver.buffer(old.session, 0) is None
    assert receiver.landed(old.session, 0) is False
    assert new.read_views(old.session, 0) is None
    assert Session(new.session.step, old.session.digest) not in (old.session, new.session)
    for chunk in receiver.missing():
        carry(new, receiver, chunk)
    assert receiver.finish() == new.session.digest


def test_the_same_session_goes_on_where_it_was() -> None:
    first, second = donors(2)
    receiver = Receiver(ProtectedState(script(9, 0)), chunk_bytes=CHUNK)
    receiver.begin(first.session, first.description)
    wanted = receiver.missing()
    for chunk in wanted[:5]:
        carry(first, receiver, chunk)
    half = receiver.buffer(first.session, wanted[5].index)  # the donor dies in the middle of this one
    assert half is not None
    half[:3] = b"xxx"
    receiver.begin(second.session, second.description)
    assert receiver.missing() == wanted[5:]
    assert receiver.buffer(second.session, wanted[0].index) is None
    assert receiver.landed(second.session, wanted[0].index) is False
    for chunk in wanted[5:]:
        carry(second, receiver, chunk)
    assert receiver.finish() == second.session.digest


@pytest.mark.parametrize("pieces", [0, 1, 1000])
def test_room_that_was_made_ahead_is_used_if_it_suffices(pieces: int) -> None:
    [donor] = donors(1)
    joiner = ProtectedState(script(9, 0))
    receiver = Receiver(joiner, chunk_bytes=CHUNK)
    hurry = iter([False] * pieces + [True] * 1000)
    receiver.reserve(donor.total_bytes if pieces else 0, lambda: next(hurry))
    receiver.begin(donor.session, donor.description, staged=False)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert receiver.finish() == donor.session.digest == joiner.digest()


class Particular:
    """Takes only tensors that begin where their storage begins, as some of torch's own code does."""

    def __init__(self, seed: int) -> None:
        self.numbers = torch.full((5,), float(seed))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert state["numbers"].storage_offset() == 0
        assert state["numbers"].untyped_storage().nbytes() == self.numbers.nbytes
        self.numbers = state["numbers"]


def test_what_others_load_does_not_lie_in_the_room_made_ahead() -> None:
    """`Generator.set_state` reads from the beginning of the storage, wherever in it the tensor lies."""

    def things(seed: int, steps: int) -> dict[str, Any]:
        generators = {f"other{n}": torch.Generator().manual_seed(seed + n) for n in range(2)}
        return script(seed, steps) | generators | {"particular": Particular(seed)}

    state, joined = ProtectedState(things(0, 3)), things(9, 0)
    donor, joiner = Donor(state, Session(3, state.digest()), CHUNK), ProtectedState(joined)
    receiver = Receiver(joiner, chunk_bytes=CHUNK)
    receiver.reserve(2 * donor.total_bytes, lambda: False)
    receiver.begin(donor.session, donor.description, staged=False)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert receiver.finish() == donor.session.digest == joiner.digest()
    assert torch.equal(joined["particular"].numbers, torch.zeros(5))


def test_addresses_say_where_the_bytes_are() -> None:
    [donor] = donors(1)
    entries = ProtectedState(script(0, 3)).tensors()
    there = [ctypes.string_at(at, e.spec.nbytes) for at, e in zip(donor.addresses, entries, strict=True)]
    assert there == [bytes(view_of(flat_bytes(entry.tensor))) for entry in entries]


@pytest.mark.parametrize("staged", [True, False])
def test_one_wrong_bit_is_found_and_the_session_starts_from_zero(staged: bool) -> None:
    [donor] = donors(1)
    joiner = ProtectedState(script(9, 1))
    before = joiner.digest()
    receiver = Receiver(joiner, chunk_bytes=CHUNK)
    receiver.begin(donor.session, donor.description, staged=staged)
    for chunk in receiver.missing():
        buffer = receiver.buffer(donor.session, chunk.index)
        assert buffer is not None
        buffer[:] = b"".join(donor.read_views(donor.session, chunk.index) or [])
        if chunk.index == 7:
            buffer[1] ^= 4
        receiver.landed(donor.session, chunk.index)
    with pytest.raises(RestoreError, match="it is received anew"):
        receiver.finish()
    assert (joiner.digest() == before) is staged
    receiver.begin(donor.session, donor.description, staged=staged)
    for chunk in receiver.missing():
        carry(donor, receiver, chunk)
    assert receiver.finish() == donor.session.digest


def test_misuse_is_refused() -> None:
    [donor] = donors(1)
    receiver = Receiver(ProtectedState(script(9, 0)), chunk_bytes=CHUNK)
    with pytest.raises(ProtocolError, match="all chunks"):
        receiver.finish()
    receiver.begin(donor.session, donor.description)
    with pytest.raises(ProtocolError, match=r"\d+ chunks of the state are missing"):
        receiver.finish()
    pack = next(chunk for chunk in receiver.missing() if len(chunk.pieces) > 1)
    with pytest.raises(ProtocolError, match="no buffer was taken"):
        receiver.landed(donor.session, pack.index)
    for index in (-1, len(donor)):
        assert receiver.buffer(donor.session, index) is None
        with pytest.raises(ProtocolError, match="was asked for"):
            donor.read_views(donor.session, index)


def test_a_state_that_does_not_fit_is_refused_before_it_travels() -> None:
    [donor] = donors(1)
    receiver = Receiver(ProtectedState({"model": nn.Linear(2, 2)}), chunk_bytes=CHUNK)
    with pytest.raises(RestoreError, match="this script protects model"):
        receiver.begin(donor.session, donor.description)
    with pytest.raises(RestoreError, match="cannot be read"):
        receiver.begin(donor.session, b"\xc1")

"""Frames and the proof of the secret, wherever the stream is cut and whatever a stranger sends."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.schema.errors import WireError
from perdure.schema.ids import Generation
from perdure.schema.messages import (
    Adopted,
    AgentHello,
    Asked,
    FromWorker,
    Leaving,
    PsRequest,
    Published,
    ServerInput,
    Status,
    StopWorker,
    WorkerMessage,
)
from perdure.schema.plan import Record
from perdure.schema.wire import (
    CONTROL_LIMIT,
    NONCE_BYTES,
    Decoder,
    FrameReader,
    Handshake,
    Role,
    Splitter,
    body,
    derive,
    encode,
    frame,
)

MESSAGES: list[msgspec.Struct] = [
    AgentHello("node", "10.0.0.1", 4, 1, ("train.py", "--steps", "3"), "0.1.0"),
    Status(()),
    FromWorker(3, body(Adopted(Generation(1, 2), 17))),
    Asked(2),
    PsRequest(),
    FromWorker(4, body(Published(Record(3, 0.5, "ab", 1.0, 4, {"lr": 0.1, "note": "ü"})))),
]
STREAM = b"".join(map(encode, MESSAGES))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_messages_come_out_whole_wherever_the_stream_is_cut(places: list[int]) -> None:
    reader: FrameReader[object] = FrameReader(ServerInput)
    got = [message for part in cut(STREAM, places) for message in reader.feed(part)]
    assert [msgspec.msgpack.encode(one) for one in got] == [msgspec.msgpack.encode(one) for one in MESSAGES]


def test_a_byte_at_a_time() -> None:
    reader: FrameReader[object] = FrameReader(ServerInput)
    got = [message for byte in STREAM for message in reader.feed(bytes([byte]))]
    assert [type(one) for one in got] == [type(one) for one in MESSAGES]


def test_a_relayed_message_is_decoded_at_its_end_only() -> None:
    relayed = FrameReader[FromWorker](FromWorker).feed(encode(MESSAGES[2]))[0]
    decoder: Decoder[object] = Decoder(WorkerMessage)
    assert decoder.decode(relayed.body) == Adopted(Generation(1, 2), 17)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_garbage_is_refused_or_waits_for_more_and_nothing_else_happens(
    data: bytes, places: list[int]
) -> None:
    reader: FrameReader[object] = FrameReader(ServerInput, limit=64)
    try:
        for part in cut(data, places):
            reader.feed(part)
    except WireError:
        with pytest.raises(WireError):  # and stays refused
            reader.feed(STREAM) if data else None


@given(st.integers(4, len(STREAM) - 1), st.integers(1, 255))
def test_a_changed_byte_never_does_more_than_change_a_message(place: int, flip: int) -> None:
    changed = bytearray(STREAM)
    changed[place] ^= flip
    reader: FrameReader[object] = FrameReader(ServerInput)
    try:
        for message in reader.feed(bytes(changed)):
            assert isinstance(message, ServerInput)
    except WireError:
        pass


@pytest.mark.parametrize(
    "content",
    [
        msgspec.msgpack.encode({"type": "Asked"}),
        msgspec.msgpack.encode({"type": "Asked", "signum": "2"}),
        msgspec.msgpack.encode({"type": "Asked", "signum": 2, "more": 1}),
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"signum": 2}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(StopWorker(1, 9)),
        msgspec.msgpack.encode(Asked(2)) + b"\0",
        b"\xc1",
        b"\x83\xa4type\xaaFromWorker\xa6worker\x01\xa4body" + b"\x91" * 1_000_000,
        b"\x82\xa4type\xa6Status\xa7workers\xdd\xff\xff\xff\xff",
    ],
    ids=[
        "missing",
        "type",
        "extra",
        "unknown",
        "untagged",
        "array",
        "direction",
        "rest",
        "bad",
        "deep",
        "long",
    ],
)
def test_what_is_not_exactly_a_message_is_refused(content: bytes) -> None:
    reader: FrameReader[object] = FrameReader(ServerInput)
    with pytest.raises(WireError):
        reader.feed(frame(content))


def test_a_frame_above_the_limit_is_refused_from_its_length_alone() -> None:
    splitter = Splitter()
    assert splitter.feed((CONTROL_LIMIT).to_bytes(4, "big")) == []
    with pytest.raises(WireError, match="16777217 bytes"):
        Splitter().feed((CONTROL_LIMIT + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="0 bytes"):
        Splitter().feed(bytes(4))
    with pytest.raises(WireError, match="allowed"):
        encode(FromWorker(0, body(Leaving())), limit=8)


def test_a_refused_stream_stays_refused() -> None:
    splitter = Splitter(limit=4)
    for _ in range(2):
        with pytest.raises(WireError):
            splitter.feed(b"\xff\xff\xff\xff")


# ── the proof ───────────────────────────────────────────────────────────────────────────────────────

SECRET = b"the secret of a job"


def nonce(number: int) -> bytes:
    return bytes([number]) * NONCE_BYTES


def agent(secret: bytes = SECRET, expects: Role = Role.COORDINATOR, number: int = 1) -> Handshake:
    return Handshake(secret, Role.AGENT, nonce(number), {expects}, initiator=True)


def coordinator(secret: bytes = SECRET, number: int = 2) -> Handshake:
    return Handshake(secret, Role.COORDINATOR, nonce(number), {Role.AGENT, Role.OBSERVER}, initiator=False)


def converse(one: Handshake, other: Handshake, size: int = 4096) -> None:
    """Carry bytes between both, `size` at a time, until neither has anything to say."""
    outbox = {one: one.opening(), other: other.opening()}
    while any(outbox.values()):
        for speaker, listener in ((one, other), (other, one)):
            data, outbox[speaker] = outbox[speaker], b""
            for at in range(0, len(data), size):
                outbox[listener] += listener.feed(data[at : at + size])


@given(st.integers(1, 50))
def test_both_ends_are_proved_whatever_the_size_of_the_segments(size: int) -> None:
    one, other = agent(), coordinator()
    converse(one, other, size)
    assert one.done
    assert other.done
    assert (one.peer, other.peer) == (Role.COORDINATOR, Role.AGENT)
    assert one.rest == other.rest == b""


def test_frames_behind_the_proof_are_kept() -> None:
    one, other = agent(), coordinator()
    proof = one.feed(other.feed(one.opening()))
    other.feed(proof + STREAM[:10])
    assert other.rest == STREAM[:10]


def test_a_wrong_secret_is_refused_by_the_acceptor_which_gives_nothing_away() -> None:
    one, other = agent(secret=b"another secret"), coordinator()
    hello = other.feed(one.opening())
    assert len(hello) == len(one.opening())
    proof = one.feed(hello)
    assert one.waiting_for_proof
    with pytest.raises(WireError, match="secret"):
        other.feed(proof)
    assert not other.done


def test_an_acceptor_without_the_secret_is_refused() -> None:
    one, other = agent(), coordinator(secret=b"another secret")
    proof = one.feed(other.feed(one.opening()))
    with pytest.raises(WireError, match="secret"):
        other.feed(proof)
    with pytest.raises(WireError, match="secret"):
        one.feed(bytes(32))
    assert not one.done


@given(st.binary(min_size=1, max_size=120))
def test_a_stranger_is_refused_or_left_waiting_but_never_let_in(data: bytes) -> None:
    other = coordinator()
    try:
        answer = other.feed(data)
    except WireError:
        answer = b""
    assert not other.done
    assert len(answer) <= len(agent().opening())
    assert other.rest == b""


@given(st.integers(0, 40), st.integers(1, 255))
def test_no_byte_of_a_hello_can_be_changed_on_the_way(place: int, flip: int) -> None:
    one, other = agent(), coordinator()
    hello = bytearray(one.opening())
    hello[place] ^= flip
    with pytest.raises(WireError):  # noqa: PT012 - at which of the two depends on the byte
        proof = one.feed(other.feed(bytes(hello)))
        other.feed(proof)
    assert not other.done


def test_a_stranger_is_refused_at_its_first_wrong_byte() -> None:
    with pytest.raises(WireError, match="does not speak"):
        coordinator().feed(b"GET / HTTP/1.1\r\n")


def test_a_proof_is_good_for_one_conversation_only() -> None:
    one, first = agent(), coordinator(number=2)
    proof = one.feed(first.feed(one.opening()))
    again = coordinator(number=3)
    again.feed(one.opening())
    with pytest.raises(WireError, match="secret"):
        again.feed(proof)


def test_a_hello_sent_back_is_refused() -> None:
    mirror = Handshake(SECRET, Role.WORKER, nonce(1), {Role.WORKER}, initiator=True)
    with pytest.raises(WireError, match="own nonce"):
        mirror.feed(mirror.opening())


def test_roles_are_part_of_the_proof() -> None:
    with pytest.raises(WireError, match="role"):
        agent(expects=Role.WORKER).feed(coordinator().feed(agent().opening()))
    worker = Handshake(SECRET, Role.WORKER, nonce(5), {Role.COORDINATOR}, initiator=True)
    with pytest.raises(WireError, match="role"):
        coordinator().feed(worker.opening())


def test_another_version_is_named() -> None:
    hello = bytearray(agent().opening())
    hello[7] += 1
    with pytest.raises(WireError, match="version 2"):
        coordinator().feed(bytes(hello))


def test_derived_keys_differ_by_purpose() -> None:
    keys = {
        derive(SECRET, "data plane"),
        derive(SECRET, "something else"),
        derive(b"other", "data plane"),
        SECRET,
    }
    assert len(keys) == 4

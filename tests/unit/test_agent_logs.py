"""Logs of bounded size that keep the beginning and the end; lines, however the stream is cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.logs import LINE_BYTES, TAIL_LINES, BoundedLog, Lines


def parts(path: Path) -> tuple[bytes, bytes, bytes]:
    """Head, the part before the newest, the newest."""
    names = (f"{path.name}.head", f"{path.name}.old", path.name)
    head, old, newest = (path.with_name(name) for name in names)
    return tuple(one.read_bytes() if one.exists() else b"" for one in (head, old, newest))  # type: ignore[return-value]


def test_a_short_log_is_one_file(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "out", limit=300)
    log.write(b"a" * 100)
    log.close()
    assert parts(tmp_path / "out") == (b"", b"", b"a" * 100)


@given(chunks=st.lists(st.binary(max_size=250), max_size=30))
def test_a_log_is_bounded_and_keeps_both_ends(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "out"
    log = BoundedLog(path, limit=300)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    head, old, newest = parts(path)
    everything = b"".join(chunks)
    assert len(head) + len(old) + len(newest) <= 300
    assert everything.startswith(head)
    assert everything.endswith(old + newest)
    if len(everything) <= 300:
        assert head + old + newest == everything


def test_a_resumed_log_goes_on_at_its_end(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        log = BoundedLog(tmp_path / "out", limit=300)
        log.write(text)
        log.close()
    assert parts(tmp_path / "out") == (b"", b"", b"onetwo")


def test_a_full_disk_loses_output_and_nothing_else() -> None:
    log = BoundedLog(Path("/dev/full"), limit=300)
    log.write(b"x" * 50)
    assert log.lost == 50
    log.write(b"y" * 7)
    assert log.lost == 57
    log.close()


TEXT = "first\nzwölf\r\n\n  indented\nprogress 1\rprogress 2\rprogress 3\nno end"
SHOWN = ["first", "zwölf", "", "  indented", "progress 3", "no end"]


@given(st.lists(st.integers(0, len(TEXT.encode())), max_size=8))
def test_lines_come_out_whole_wherever_the_stream_is_cut(places: list[int]) -> None:
    data, lines = TEXT.encode(), Lines()
    edges = [0, *sorted(places), len(data)]
    got = [line for a, b in itertools.pairwise(edges) for line in lines.feed(data[a:b])]
    assert got + lines.end() == SHOWN
    assert list(lines.tail) == SHOWN
    assert lines.end() == []


def test_a_line_without_end_is_cut_and_takes_no_memory() -> None:
    lines = Lines()
    got = [line for _ in range(100) for line in lines.feed(b"x" * 1000)]
    assert "".join(got) == "x" * (100_000 // LINE_BYTES * LINE_BYTES)
    for _ in range(100):
        assert lines.feed(b"bar" * 100 + b"\r") == []


def test_the_tail_is_the_last_lines_even_if_they_are_no_text() -> None:
    lines = Lines()
    lines.feed(b"".join(b"line %d\n" % n for n in range(100)) + b"\xff\xfe\n")
    assert len(lines.tail) == TAIL_LINES
    assert lines.tail[-1] == "\ufffd\ufffd"
    lines.feed(b"50%\r60%")
    assert lines.last().endswith("line 99\n\ufffd\ufffd\n60%")

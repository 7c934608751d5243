"""The progress page: one record, never half of one."""

from __future__ import annotations

import os

from perdure.agent.procfs import Process, parse_stat, process, processes
from perdure.schema.progress import PAGE_BYTES, RECORD, Phase, read
from perdure.worker.progress import ProgressPage


def test_what_is_written_is_read_from_the_shared_memory() -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE_BYTES)
    page = ProgressPage(fd)
    fresh = read(memoryview(os.pread(fd, PAGE_BYTES, 0)))
    assert fresh is not None
    assert (fresh.counter, fresh.phase) == (0, Phase.SCRIPT)
    for step in range(3):
        page.write(Phase.REDUCE, step, 5, 17)
    seen = read(memoryview(os.pread(fd, PAGE_BYTES, 0)))
    os.close(fd)
    assert seen is not None
    assert (seen.counter, seen.phase, seen.step, seen.micro_batch, seen.samples) == (
        3,
        Phase.REDUCE,
        2,
        5,
        17,
    )


def test_a_page_of_ones_own_needs_no_launcher() -> None:
    ProgressPage().write(Phase.DATA)


def test_half_a_record_is_not_read() -> None:
    page = bytearray(PAGE_BYTES)
    RECORD.pack_into(page, 0, 8, Phase.DATA, 1, 2, 3, 7)
    assert read(memoryview(page)) is None


def test_nonsense_is_not_read() -> None:
    page = bytearray(PAGE_BYTES)
    RECORD.pack_into(page, 0, 8, 99, 1, 2, 3, 8)
    assert read(memoryview(page)) is None


def test_a_process_with_any_name_is_parsed() -> None:
    text = "17 (a) b (c) R 4242 5 6 0 -1 4194304 88\n"
    assert parse_stat(text) == Process(pid=17, state="R", parent=4242, session=6)


def test_this_process_is_found() -> None:
    found = process(os.getpid())
    assert found is not None
    assert (found.parent, found.session) == (os.getppid(), os.getsid(0))
    assert os.getpid() in [one.pid for one in processes()]
    assert process(2**22 + 1) is None

"""Writing lines never waits for who reads them."""

import os
import re

import pytest

from quire.server.wire import access_log
from quire.server.wire.access_log import MAX_WAITING, LineWriter

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe():
    """Both ends of a pipe, as they are left by a test."""
    ends = dict(zip(("source", "sink"), os.pipe(), strict=True))
    yield ends
    for descriptor in ends.values():
        os.close(descriptor)


def dropped_line(number):
    return b"dropped %d\n" % number


def test_what_nobody_reads_is_dropped_and_counted(pipe, monkeypatch):
    writer = LineWriter(pipe["sink"], dropped_line)
    for _ in range(2 * MAX_WAITING):
        writer.write(LINE)  # would wait for ever if it waited for the reader
    num_dropped = writer.num_dropped
    assert 0 < num_dropped <= MAX_WAITING
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT", 0.01)
    writer.close()  # does not wait for ever either
    written = b""
    while written.count(LINE) + told(written) < 2 * MAX_WAITING or not written.endswith(b"\n"):
        written += os.read(pipe["source"], 1 << 16)
    assert (written.count(LINE), told(written)) == (2 * MAX_WAITING - num_dropped, num_dropped)


def told(written):
    """Return how many lines were dropped as far as the complete lines say."""
    return sum(map(int, re.findall(rb"dropped (\d+)\n", written)))


def test_all_lines_are_written_before_it_is_closed(pipe, monkeypatch):
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT", 60)
    writer = LineWriter(pipe["sink"], dropped_line)
    for number in range(500):
        writer.write(b"%d\n" % number)
    writer.close()
    assert os.read(pipe["source"], 1 << 16).split() == [b"%d" % number for number in range(500)]
    assert writer.num_dropped == 0


def test_a_pipe_that_its_reader_has_closed(pipe, monkeypatch):
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT", 60)
    os.close(pipe.pop("source"))
    writer = LineWriter(pipe["sink"], dropped_line)
    for _ in range(5):
        writer.write(LINE)
    writer.close()
    assert writer.num_dropped == 5

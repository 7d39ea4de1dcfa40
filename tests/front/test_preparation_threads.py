"""Long texts are prepared in threads: the event loop goes on, and short texts do not wait for long ones."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.config import SchedulerConfig
from quire.errors import QueueFullError, RequestTimeoutError
from quire.front.text import preparation_threads
from quire.front.text.preparation_threads import INLINE_LENGTH, LONG_LENGTH, PreparationThreads, length_of
from quire.sampling_params import SamplingParams

MEDIUM_LENGTH = INLINE_LENGTH + 1
LIMIT = 60  # seconds; only a failing test waits as long


@pytest.fixture
def gate():
    """An event that jobs wait for; set at the end, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_short_text_is_prepared_at_once():
    threads = PreparationThreads(SchedulerConfig())
    assert await threads.run(INLINE_LENGTH, threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize("length", [MEDIUM_LENGTH, LONG_LENGTH])
async def test_the_event_loop_goes_on_meanwhile(length, gate):
    work = asyncio.create_task(PreparationThreads(SchedulerConfig()).run(length, lambda: gate.wait(LIMIT)))
    await asyncio.sleep(0)
    gate.set()
    assert await work


async def test_a_shorter_text_does_not_wait_for_a_long_one(gate):
    threads = PreparationThreads(SchedulerConfig())
    long = asyncio.create_task(threads.run(LONG_LENGTH, lambda: gate.wait(LIMIT)))
    await asyncio.sleep(0)
    assert await threads.run(MEDIUM_LENGTH, lambda: "done") == "done"
    assert not long.done()
    gate.set()
    assert await long


async def test_one_long_text_at_a_time():
    threads = PreparationThreads(SchedulerConfig())
    running, most = 0, 0

    def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    await asyncio.gather(*(threads.run(LONG_LENGTH, work) for _ in range(50)))
    assert (most, running) == (1, 0)


async def test_a_text_that_nobody_waits_for_is_skipped(gate):
    threads = PreparationThreads(SchedulerConfig())
    first = asyncio.create_task(threads.run(LONG_LENGTH, lambda: gate.wait(LIMIT)))
    started = []
    second = asyncio.create_task(threads.run(LONG_LENGTH, lambda: started.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await threads.run(LONG_LENGTH, lambda: started.append("third"))
    assert started == ["third"]


@pytest.mark.parametrize(
    ("length", "num_waiting", "message"),
    [
        (
            INLINE_LENGTH,
            4,
            r"4 requests wait .* \(max_num_seqs 1 and max_num_queued_reqs 3\); try again later$",
        ),
        (MEDIUM_LENGTH, 4, "4 requests wait .* max_num_queued_reqs 3"),
        (LONG_LENGTH, 2, f"2 requests with texts of {LONG_LENGTH} characters .* or send less text"),
    ],
)
async def test_too_many_waiting_are_refused(gate, monkeypatch, length, num_waiting, message):
    monkeypatch.setattr(preparation_threads, "MAX_LONG_WAITING", 2)
    threads = PreparationThreads(SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=3))
    started = threading.Event()

    def run(work):
        return asyncio.create_task(threads.run(length, work, may_wait=True))

    first = run(lambda: (started.set(), gate.wait(LIMIT)))
    await asyncio.to_thread(started.wait, LIMIT)
    waiting = [run(lambda: None) for _ in range(num_waiting)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match=message):
        await run(lambda: None)
    gate.set()
    await asyncio.gather(first, *waiting)


async def test_it_times_out(gate, monkeypatch):
    monkeypatch.setattr(preparation_threads, "TIMEOUT", 0)
    with pytest.raises(RequestTimeoutError, match=f"text of {LONG_LENGTH} characters"):
        await PreparationThreads(SchedulerConfig()).run(LONG_LENGTH, lambda: gate.wait(LIMIT))


async def test_errors_are_the_callers():
    threads = PreparationThreads(SchedulerConfig())
    with pytest.raises(ZeroDivisionError):
        await threads.run(LONG_LENGTH, lambda: 1 // 0)
    assert await threads.run(LONG_LENGTH, lambda: "next") == "next"


@pytest.mark.parametrize(
    ("prompt", "at_least", "at_most"),
    [
        ("a" * 50, 50, 50),
        ([1] * 100, 1, 50),
        ([{"role": "user", "content": "a" * 300}] * 2, 600, 700),
        ([{"role": "user", "content": ""}] * 100_000, LONG_LENGTH, LONG_LENGTH),
        ([{"role": "user", "content": [{"type": "text", "text": "a" * 300}]}], 300, 400),
        ([{"role": "user"}], 1, 50),
        ([None], 0, 50),
        (None, 0, 0),
        ([], 0, 0),
    ],
)
def test_length(prompt, at_least, at_most):
    assert at_least <= length_of(prompt, SamplingParams()) <= at_most


def test_bad_words_count():
    assert length_of("a", SamplingParams(bad_words=("b" * 200, "c" * 200))) == 401
    assert length_of("a", "no parameters") == 1


async def test_a_short_conversation_waits_in_a_thread_of_its_own(gate):
    threads = PreparationThreads(SchedulerConfig())
    medium = asyncio.create_task(threads.run(MEDIUM_LENGTH, lambda: gate.wait(LIMIT)))
    await asyncio.sleep(0)
    assert await threads.run(INLINE_LENGTH, threading.get_ident, may_wait=True) != threading.get_ident()
    assert not medium.done()
    gate.set()
    assert await medium

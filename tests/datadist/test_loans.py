"""Loans by themselves: what a reader gets while blocks are computed, and when it must get nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.datadist.caches.spans import ByteSpans
from quire.datadist.loans.arriving_blocks import ArrivingBlocks
from quire.datadist.loans.loans import BlockPart, Loans
from quire.datadist.status import LLMException, LLMStatusCode

BLOCK_BYTES = 40
LAYER_ENDS = (10, 20, 35)
DIGEST = b"what these blocks hold"
FIRST = 1  # number of the first loan
LONG = 1e6  # seconds


def always() -> bool:
    return True


def never() -> bool:
    return False


class OneLoan(Loans):
    """What is lent is one prompt."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(BLOCK_BYTES)
        self.number = self.offer("one", "request", num_blocks, DIGEST)
        self.num_computed = 0
        assert self.number


def lent(num_blocks: int = 4) -> OneLoan:
    return OneLoan(num_blocks)


def compute(loans: OneLoan, block_ids: list[int]) -> None:
    loans.begin_step(loans.number, loans.num_computed, [(one,) for one in block_ids])
    loans.num_computed += len(block_ids)
    for end in LAYER_ENDS:
        loans.advance([loans.number], end)
    loans.end_step(loans.number)


def refused(loans: Loans, *arguments, **changes) -> LLMStatusCode:
    wanted = {"name": "one", "first_block": 0, "num_blocks": 4, "digest": DIGEST, "patience": 0.0}
    with pytest.raises(LLMException) as caught:
        loans.open(**{**wanted, "is_wanted": always, **changes})
    return caught.value.status_code


def put(target: np.ndarray, spans: ByteSpans, content: np.ndarray) -> None:
    """Write bytes where spans of a cache are."""
    places = [
        np.arange(start, start + length) for start, length in zip(spans.offsets, spans.lengths, strict=True)
    ]
    target.reshape(-1)[np.concatenate(places)] = content.reshape(-1)


@settings(max_examples=60)
@given(st.data())
def test_a_reader_gets_every_byte_once_in_any_interleaving_with_the_steps_that_compute_it(data):
    steps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(sum))
    num_blocks = sum(steps)
    first = data.draw(st.integers(0, num_blocks - 1))
    ids = np.array(data.draw(st.permutations(range(num_blocks))))
    loans = lent(num_blocks)
    reading = loans.open("one", first, num_blocks, DIGEST, patience=0, is_wanted=always)
    arriving = ArrivingBlocks(np.arange(num_blocks - first)[None], first, BLOCK_BYTES)
    source = np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)
    target = np.zeros((num_blocks - first, BLOCK_BYTES), dtype=np.uint8)
    final = np.arange(1, source.size + 1, dtype=np.uint64).astype(np.uint8).reshape(source.shape) | 1

    def read_some(count: int | None = None) -> None:
        for _ in range(data.draw(st.integers(0, 2)) if count is None else count):
            part = None if arriving.is_complete else reading.ready_part()
            if part is not None:
                columns = slice(part.offset, part.offset + part.num_bytes)
                content = source[reading.block_ids(part)[0], columns]
                put(target, arriving.spans_for(part), content)

    done = 0
    for count in steps:
        new = ids[done : done + count].tolist()
        loans.begin_step(FIRST, done, [(one,) for one in new])
        for start, end in zip((0, *LAYER_ENDS), (*LAYER_ENDS, BLOCK_BYTES), strict=True):
            read_some()
            source[new, start:end] = final[new, start:end]
            if end in LAYER_ENDS:
                loans.advance([FIRST], end)
        loans.end_step(FIRST)
        done += count
        read_some()
    read_some(count=2 * num_blocks)
    assert arriving.is_complete
    assert (target == final[ids[first:]]).all()
    reading.require_held()
    reading.close()


def test_whole_blocks_come_in_one_part_if_they_are_ready():
    loans = lent()
    compute(loans, [7, 3, 4, 9])
    reading = loans.open("one", 1, 4, DIGEST, patience=0, is_wanted=always)
    assert list(reading.parts(1e9, always)) == [BlockPart(1, 3, 0, BLOCK_BYTES)]
    assert reading.block_ids(BlockPart(1, 3, 0, BLOCK_BYTES)).tolist() == [[3, 4, 9]]


def test_a_reader_waits_for_what_is_computed_and_gets_each_layer():
    loans = lent(2)
    reading = loans.open("one", 0, 2, DIGEST, patience=0, is_wanted=always)
    parts: list[BlockPart] = []
    thread = threading.Thread(target=lambda: parts.extend(reading.parts(1e9, always)))
    thread.start()
    compute(loans, [0])
    compute(loans, [1])
    thread.join(20)
    assert not thread.is_alive()
    assert sum(part.num_blocks * part.num_bytes for part in parts) == 2 * BLOCK_BYTES
    assert parts[0].first_block == parts[0].offset == 0


def test_a_reader_waits_for_a_loan_that_comes_late():
    loans = Loans(BLOCK_BYTES)
    threading.Timer(0.05, loans.offer, ("one", "request", 4, DIGEST)).start()
    loans.open("one", 0, 4, DIGEST, patience=20, is_wanted=always).close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"name": "two"}, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        ({"num_blocks": 3}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"digest": b"other tokens"}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"first_block": 4}, LLMStatusCode.LLM_PARAM_INVALID),
        ({"first_block": 2**32 - 1}, LLMStatusCode.LLM_PARAM_INVALID),
    ],
)
def test_only_what_was_lent_can_be_read(changes, code):
    assert refused(lent(), **changes) is code


def test_a_loan_that_ends_fails_its_readers_even_when_all_has_been_read():
    loans = lent()
    reading = loans.open("one", 0, 4, DIGEST, patience=0, is_wanted=always)
    compute(loans, [0, 1, 2, 3])
    assert list(reading.parts(1e9, always))
    loans.end(FIRST, "its lease has ended")
    with pytest.raises(LLMException, match="its lease has ended"):
        reading.require_held()
    assert refused(loans) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    waiting = lent()
    reading = waiting.open("one", 0, 4, DIGEST, patience=0, is_wanted=always)
    threading.Timer(0.05, waiting.close, ("the engine ends",)).start()
    with pytest.raises(LLMException, match="the engine ends"):
        list(reading.parts(1e9, always))


def test_a_step_that_was_never_computed_ends_the_loan():
    loans = lent()
    loans.begin_step(FIRST, 0, [(0,), (1,)])
    loans.begin_step(FIRST, 2, [(2,), (3,)])
    assert refused(loans) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert loans.is_empty


def test_blocks_that_are_computed_anew_end_the_loan():
    loans = lent()
    compute(loans, [0, 1])
    loans.begin_step(FIRST, 0, [(5,), (6,)])
    assert refused(loans) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_steps_of_a_loan_that_has_ended_are_not_those_of_another_that_has_got_its_name():
    loans = lent(1)
    loans.end(FIRST, "its request was preempted")
    other = loans.offer("one", "another request", 1, DIGEST)
    loans.begin_step(FIRST, 0, [(7,)])
    loans.advance([FIRST], 10)
    loans.end_step(FIRST)
    assert not loans.is_ready(other)
    reading = loans.open("one", 0, 1, DIGEST, patience=0, is_wanted=always)
    assert reading.ready_part() is None
    reading.close()
    loans.end(FIRST, "it ends twice")
    loans.number = other
    compute(loans, [3])
    assert loans.is_ready(other)


def test_a_reader_that_is_not_wanted_or_late_waits_no_more():
    reading = lent().open("one", 0, 4, DIGEST, patience=0, is_wanted=always)
    with pytest.raises(ConnectionError, match="no longer needed"):
        list(reading.parts(1e9, lambda: False))
    with pytest.raises(TimeoutError, match="not computed in time"):
        list(reading.parts(0, always))
    with pytest.raises(ConnectionError, match="no longer needed"):
        Loans(BLOCK_BYTES).open("one", 0, 4, DIGEST, patience=1e9, is_wanted=lambda: False)
    closed = Loans(BLOCK_BYTES)
    closed.close("the engine ends")
    assert refused(closed, patience=1e9) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_owners_learn_who_is_renewed_read_and_released():
    loans = lent()
    assert loans.take_renewed() == loans.take_released() == set()
    assert loans.renew(["one", "unknown"]) == (["unknown"], [])
    assert (loans.take_renewed(), loans.take_renewed()) == ({"request"}, set())
    reading = loans.open("one", 0, 4, DIGEST, patience=0, is_wanted=always)
    assert loans.take_renewed() == loans.take_renewed() == {"request"}, "who reads needs no heartbeat"
    reading.close()
    assert loans.take_renewed() == set()
    loans.release(["one", "unknown"])
    assert (loans.take_released(), loans.take_released()) == ({"request"}, set())
    another = loans.offer("one", "another request", 1, DIGEST)
    assert another != FIRST
    assert loans.offer("one", "a third", 1, DIGEST) is None
    assert not loans.is_ready(another)


@pytest.mark.parametrize("num_computed", [0, 2, 4])
def test_owners_learn_what_was_given_back_before_they_ask(num_computed):
    loans = lent()
    compute(loans, [5, 6, 7, 8][:num_computed])
    assert not loans.was_given_back(FIRST)
    loans.release(["one"])
    assert loans.was_given_back(FIRST)
    loans.end(FIRST, "its owner knows")
    assert not loans.was_given_back(FIRST)


def test_what_is_given_back_before_it_is_offered_is_lent_to_nobody():
    loans = Loans(BLOCK_BYTES)
    loans.release(["one"])
    assert refused(loans, patience=LONG, is_wanted=never) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert loans.offer("one", "request", 4, DIGEST) == FIRST
    assert loans.was_given_back(FIRST)
    assert loans.is_empty
    assert loans.offer("one", "another request", 4, DIGEST) is not None
    assert not loans.is_empty, "only the next loan of this name was meant"


def test_nobody_waits_for_a_loan_that_has_ended_and_its_name_may_be_given_anew():
    loans = lent()
    loans.end(FIRST, "its request has failed")
    loans.release(["one"])
    assert refused(loans, patience=LONG, is_wanted=never) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    loans.offer("one", "another request", 4, DIGEST)
    assert not loans.is_empty


def test_only_so_many_names_are_remembered(monkeypatch):
    monkeypatch.setattr("quire.datadist.loans.loans._MAX_OVER", 2)
    loans = Loans(BLOCK_BYTES)
    loans.release(["one", "two", "three"])
    assert loans.offer("one", "request", 4, DIGEST) == FIRST
    assert not loans.was_given_back(FIRST)


@pytest.mark.parametrize(
    "part",
    [
        BlockPart(1, 1, 0, 10),  # before the first block that was asked for
        BlockPart(4, 3, 0, 10),
        BlockPart(2, 2**31, 0, 10),
        BlockPart(2, 0, 0, 10),
        BlockPart(2, 1, 10, 10),  # leaves a gap
        BlockPart(2, 1, 0, 0),
        BlockPart(2, 1, 0, BLOCK_BYTES + 1),
    ],
)
def test_parts_that_do_not_continue_what_has_come_are_refused(part):
    arriving = ArrivingBlocks(np.array([[5, 6, 7]]), 2, BLOCK_BYTES)
    with pytest.raises(ValueError, match="BlockPart"):
        arriving.spans_for(part)
    assert arriving.spans_for(BlockPart(2, 3, 0, BLOCK_BYTES)).offsets.tolist() == [5 * BLOCK_BYTES]
    assert arriving.is_complete
    with pytest.raises(ValueError, match="BlockPart"):
        arriving.spans_for(BlockPart(2, 1, 0, 10))

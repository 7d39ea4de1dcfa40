import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.drafts.ngram_proposer import NgramProposer
from quire.execution.drafts.proposer import RowsToContinue
from quire.step import NO_TOKEN


def naive(tokens, min_n, max_n, count):
    """Every length from the longest, every earlier place from the newest, token by token."""
    for length in range(max_n, min_n - 1, -1):
        suffix = tokens[len(tokens) - length :] if length <= len(tokens) else None
        for end in range(len(tokens) - 1, length - 1, -1):
            if suffix is not None and tokens[end - length : end] == suffix:
                copied = list(tokens)
                for index in range(count):
                    copied.append(copied[end + index])
                return copied[len(tokens) :]
    return []


def propose(rows, min_n, max_n, num_drafts, max_drafts=None):
    longest = max(map(len, rows))
    token_ids = np.full((len(rows) + 2, longest + 5), 1, dtype=np.int32)  # void tokens behind, all alike
    slots = np.arange(len(rows))[::-1] + 2
    for slot, row in zip(slots.tolist(), rows, strict=True):
        token_ids[slot, : len(row)] = row
    given_rows = RowsToContinue(
        token_ids=token_ids,
        slots=slots,
        num_tokens=np.array([len(row) for row in rows]),
        block_tables=np.zeros((len(rows), 0), dtype=np.int32),
        num_blocks=np.zeros(len(rows), dtype=np.int64),
        max_drafts=np.array(max_drafts or [num_drafts] * len(rows)),
    )
    drafts = NgramProposer(min_n, max_n).propose(given_rows, num_drafts)
    assert drafts.shape == (len(rows), num_drafts)
    found = [row[row != NO_TOKEN].tolist() for row in drafts]
    assert all((row[len(kept) :] == NO_TOKEN).all() for row, kept in zip(drafts, found, strict=True))
    return found


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    min_n=st.integers(1, 4),
    more=st.integers(0, 4),
    num_drafts=st.integers(1, 6),
    data=st.data(),
)
def test_proposals_are_those_of_the_plain_search(rows, min_n, more, num_drafts, data):
    max_drafts = data.draw(st.lists(st.integers(0, num_drafts), min_size=len(rows), max_size=len(rows)))
    expected = [naive(row, min_n, min_n + more, count) for row, count in zip(rows, max_drafts, strict=True)]
    assert propose(rows, min_n, min_n + more, num_drafts, max_drafts) == expected


def test_a_loop_is_proposed_at_full_length():
    assert propose([[9, 8, 7, 8, 7, 8]], 2, 4, 5) == [[7, 8, 7, 8, 7]]
    assert propose([[5, 5]], 1, 4, 4) == [[5, 5, 5, 5]]


def test_the_longest_match_wins_over_a_newer_shorter_one():
    assert propose([[1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]], 1, 3, 1) == [[40]]
    assert propose([[1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]], 1, 2, 1) == [[50]]


def test_a_proposal_takes_tens_of_microseconds():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, 2000).tolist() for _ in range(64)]
    token_ids = np.array(rows, dtype=np.int32)
    given_rows = RowsToContinue(
        token_ids=token_ids,
        slots=np.arange(64),
        num_tokens=np.full(64, 2000),
        block_tables=np.zeros((64, 0), dtype=np.int32),
        num_blocks=np.zeros(64, dtype=np.int64),
        max_drafts=np.full(64, 4),
    )
    proposer = NgramProposer(2, 4)
    fastest = np.inf
    for _ in range(20):
        started = time.perf_counter()
        proposer.propose(given_rows, 4)
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest / 64 < 100e-6  # 10 us on an idle core; the margin is for a busy machine

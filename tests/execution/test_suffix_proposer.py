"""Drafts of what most often followed, compared with a search that takes every place and length in turn."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.drafts.proposer import RowsToContinue
from quire.execution.drafts.suffix_proposer import OutputHistory, SuffixProposer
from quire.step import NO_TOKEN

SCOPE = ("tenant", "salt")


def places(text, suffix, length):
    """The indices behind each occurrence of the last `length` tokens of `suffix` in `text`."""
    wanted = suffix[len(suffix) - length :]
    return [end for end in range(length, len(text) + 1) if text[end - length : end] == wanted]


def naive(tokens, history, min_n, max_n, count):
    for length in range(min(max_n, len(tokens)), min_n - 1, -1):
        for text, starts in (
            (tokens, places(tokens[:-1], tokens, length)),
            (history, places(history, tokens, length)),
        ):
            if starts:
                return continued(text, starts, count)
    return []


def continued(text, starts, count):
    drafts, num_starts = [], len(starts)
    while len(drafts) < count:
        following = [(text + drafts)[start + len(drafts)] for start in starts]
        most = max(Counter(following).values())
        chosen = [token for token in following if following.count(token) == most][-1]
        starts = [start for start, token in zip(starts, following, strict=True) if token == chosen]
        if chosen == NO_TOKEN or len(starts) < 0.3 * num_starts:
            break
        drafts.append(chosen)
    return drafts


def propose(proposer, tokens, count, slot=0):
    token_ids = np.full((4, len(tokens) + 5), 1, dtype=np.int32)  # void tokens behind
    token_ids[slot, : len(tokens)] = tokens
    rows = RowsToContinue(
        token_ids=token_ids,
        slots=np.array([slot]),
        num_tokens=np.array([len(tokens)]),
        block_tables=np.zeros((1, 0), dtype=np.int32),
        num_blocks=np.zeros(1, dtype=np.int64),
        max_drafts=np.array([count]),
    )
    [row] = proposer.propose(rows, count + 1)
    found = row[row != NO_TOKEN].tolist()
    assert (row[len(found) :] == NO_TOKEN).all()
    return found


def proposer_of(outputs=(), *, min_n=2, max_n=8, history_tokens=1000, scope=SCOPE):
    proposer = SuffixProposer(min_n, max_n, history_tokens, 4)
    proposer.open(3, 1, scope)
    for output in outputs:
        proposer.finish(3, np.array(output, dtype=np.int32))
    proposer.open(0, 1, SCOPE)
    return proposer


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


@settings(max_examples=300)
@given(TOKENS, st.lists(TOKENS, max_size=3), st.integers(1, 3), st.integers(0, 5), st.integers(1, 6))
def test_drafts_are_those_of_the_plain_search(tokens, outputs, min_n, more, count):
    history = [token for output in outputs for token in (*output, NO_TOKEN)]
    proposer = proposer_of(outputs, min_n=min_n, max_n=min_n + more)
    assert propose(proposer, tokens, count) == naive(tokens, history, min_n, min_n + more, count)


def test_what_followed_most_often_is_proposed():
    assert propose(proposer_of(), [1, 2, 7, 1, 2, 7, 1, 2, 8, 5, 1, 2], 1) == [7]
    assert propose(proposer_of(), [1, 2, 7, 1, 2, 8, 5, 1, 2], 1) == [8]  # the newest of two


def test_an_earlier_output_of_the_same_scope_is_continued():
    proposer = proposer_of([[4, 5, 6, 7, 8, 9]])
    assert propose(proposer, [1, 5, 6], 4) == [7, 8, 9]  # and not what came after it
    assert propose(proposer, [1, 5, 6, 3, 5, 6], 2) == [3, 5]  # its own, as the match is no longer elsewhere
    assert propose(proposer, [4, 5, 6, 3, 2, 4, 5, 6], 2) == [3, 2]
    assert propose(proposer, [5, 6, 3, 2, 4, 5, 6], 2) == [7, 8]


@pytest.mark.parametrize("scope", [("other", "salt"), ("tenant", "other"), ("tenantsalt", "")])
def test_nothing_comes_from_another_scope(scope):
    assert propose(proposer_of([[4, 5, 6, 7, 8, 9]], scope=scope), [1, 5, 6], 4) == []


def test_without_history_only_the_request_itself_counts():
    proposer = proposer_of([[4, 5, 6, 7]], history_tokens=0)
    assert propose(proposer, [1, 5, 6], 4) == []
    assert propose(proposer, [5, 6, 1, 5, 6], 2) == [1, 5]


def test_the_number_of_scopes_is_bounded():
    proposer = SuffixProposer(2, 8, 1000, 4)
    for number in range(1000):
        proposer.open(0, 1, ("tenant", str(number)))
        proposer.finish(0, np.array([4, 5, 6], dtype=np.int32))
        proposer.open(1, 1, ("regular", ""))
        proposer.finish(1, np.array([4, 5, 7], dtype=np.int32))
    assert len(proposer._histories) <= 64
    proposer.open(1, 1, ("regular", ""))
    assert propose(proposer, [4, 5], 1, slot=1) == [7]


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=12), st.integers(1, 40))
def test_a_history_keeps_the_newest_tokens(outputs, capacity):
    history = OutputHistory(capacity)
    expected: list[int] = []
    for output in outputs:
        history.add(np.array(output, dtype=np.int32))
        kept = output[-(capacity - 1) :] if capacity > 1 else []
        expected += [*kept, NO_TOKEN] if kept else []
        expected = expected[-capacity:]
        assert history.token_ids.tolist() == expected
        assert len(history._buffer) <= 2 * capacity

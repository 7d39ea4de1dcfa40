import numpy as np
import pytest

from quire.execution.ordering import likeliest, top_tokens


def sorted_ids(row):
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def rows_with_ties(num_rows, vocab_size, levels, seed=0):
    logits = np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 3
    return (np.round(logits * levels) / levels).astype(np.float32)


@pytest.mark.parametrize("levels", [1, 4, 1000])
@pytest.mark.parametrize("vocab_size", [1, 5, 512, 513, 1300, 9000])
def test_a_head_holds_the_likeliest_tokens_in_order(levels, vocab_size):
    logits = rows_with_ties(12, vocab_size, levels)
    logits[3, 5 : vocab_size // 2] = -np.inf
    logits[4, 1:] = -np.inf
    head = likeliest(logits)
    for row in range(len(logits)):
        count = head.count[row]
        expected = sorted_ids(logits[row])[:count]
        assert head.token_ids[row, :count].tolist() == expected
        assert np.array_equal(head.logits[row, :count], logits[row, expected])
        assert (head.logits[row, count:] == -np.inf).all()
        if head.complete[row]:
            assert count == np.isfinite(logits[row]).sum()
        else:
            assert count == 0 or 128 <= count < vocab_size
        if count == 0:
            assert (logits[row] == np.sort(logits[row])[-1024]).sum() > 1
    assert head.complete.all() == (vocab_size <= 512)
    assert head.complete[4]


def test_a_row_of_equal_logits_has_no_head_unless_it_is_short():
    assert likeliest(np.zeros((2, 5000), dtype=np.float32)).count.tolist() == [0, 0]
    assert likeliest(np.zeros((2, 500), dtype=np.float32)).token_ids.tolist() == [list(range(500))] * 2


@pytest.mark.parametrize("levels", [0.1, 1, 1000])
@pytest.mark.parametrize("vocab_size", [7, 700, 6000])
def test_top_tokens_settle_ties_by_id(levels, vocab_size):
    logits = rows_with_ties(9, vocab_size, levels, seed=3)
    logits[2, 3:] = -np.inf
    assert top_tokens(logits, 20).tolist() == [sorted_ids(row)[:20] for row in logits]


def test_top_tokens_of_a_row_with_fewer_finite_logits_go_on_by_id():
    logits = np.full((1, 6), -np.inf, dtype=np.float32)
    logits[0, [4, 2]] = 1.0, 2.0
    assert top_tokens(logits, 5).tolist() == [[2, 4, 0, 1, 3]]

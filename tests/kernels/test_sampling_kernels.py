"""What sampling asks of whole rows of logits: against full sorts, and bit for bit in any company."""

import numpy as np
import pytest
from native_settings import INSTRUCTION_SETS, instructions, threads

from pairwise import pairwise
from quire.kernels.cpu.sampling import NativeScans
from quire.kernels.sampling.host_choice import top_tokens
from quire.kernels.sampling.row_scans import ReferenceScans
from triton_scans import TritonSampling

native, reference, in_triton = NativeScans(), ReferenceScans(), TritonSampling()
VOCAB_SIZES = [1, 5, 17, 512, 513, 1300, 9000, 40_003]


KERNELS = ["reference", "triton", *INSTRUCTION_SETS]


def on_kernels(**values):
    """Parametrize a test as `pairwise` does, with the kernels as one more parameter."""
    return pairwise(indirect=["kernels"], kernels=KERNELS, **values)


@pytest.fixture(params=KERNELS)
def kernels(request):
    """The reference, those in Triton, or the native kernels with an instruction set that this CPU has."""
    if request.param in ("reference", "triton"):
        yield reference if request.param == "reference" else in_triton
        return
    with instructions(request.param):
        yield native


def rows_with_ties(num_rows, vocab_size, levels, seed=0):
    logits = np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * 3
    return (np.round(logits * levels) / levels).astype(np.float32)


def sorted_ids(row):
    return np.lexsort((np.arange(len(row)), -row)).tolist()


def among_poison(logits):
    """Return the same rows in a larger matrix that is NaN elsewhere, and which they are there."""
    wider = np.full((2 * len(logits) + 1, logits.shape[1] + 5), np.nan, dtype=np.float32)
    wider[1::2, 2:-3] = logits
    return wider[:, 2:-3], np.arange(len(logits)) * 2 + 1


@pytest.mark.formats
@pytest.mark.first_case
@on_kernels(levels=[1, 1000])
def test_the_largest_is_the_first_of_equal_ones(kernels, levels):
    for vocab_size in VOCAB_SIZES:
        logits = rows_with_ties(9, vocab_size, levels)
        logits[1] = -np.inf
        logits[2, vocab_size // 2] = np.inf
        logits[3, vocab_size // 3 :] = np.nan
        logits[4] = -0.0
        logits[4, vocab_size - 1] = 0.0
        wider, rows = among_poison(logits)
        for token_ids, maxima in (kernels.largest(logits), kernels.largest(wider, rows)):
            assert token_ids.tolist() == logits.argmax(axis=1).tolist()
            assert np.array_equal(maxima, logits[np.arange(9), token_ids], equal_nan=True)


def test_the_largest_is_found_wherever_it_is(kernels):
    for place in (0, 1, 1023, 1024, 16_383, 16_384, 40_002):
        row = np.full((1, 40_003), -5.0, dtype=np.float32)
        for value in (3.0, np.nan):
            row[0, place:] = value
            token_ids, maxima = kernels.largest(row)
            assert token_ids.tolist() == [place]
            assert np.array_equal(maxima, [value], equal_nan=True)


@pytest.mark.formats
@pytest.mark.first_case
@on_kernels(levels=[1, 4, 1000])
def test_a_head_holds_the_likeliest_tokens_in_order(kernels, levels):
    for vocab_size in VOCAB_SIZES:
        logits = rows_with_ties(12, vocab_size, levels)
        logits[3, 5 : vocab_size // 2] = -np.inf
        logits[4, 1:] = -np.inf
        head = kernels.likeliest(logits)
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


@pairwise(levels=[1, 4, 1000])
def test_native_heads_are_the_reference_s(levels):
    for vocab_size in VOCAB_SIZES:
        logits = rows_with_ties(12, vocab_size, levels, seed=1)
        logits[3, 5 : vocab_size // 2] = -np.inf
        wider, rows = among_poison(logits)
        expected = reference.likeliest(logits)
        for head in (native.likeliest(logits), native.likeliest(wider, rows)):
            for part in ("logits", "token_ids", "count", "complete"):
                assert np.array_equal(getattr(head, part), getattr(expected, part)), part


def test_a_row_of_equal_logits_has_no_head_unless_it_is_short(kernels):
    assert kernels.likeliest(np.zeros((2, 5000), dtype=np.float32)).count.tolist() == [0, 0]
    short = kernels.likeliest(np.zeros((2, 500), dtype=np.float32))
    assert short.token_ids.tolist() == [list(range(500))] * 2


@pytest.mark.formats
@pytest.mark.first_case
@on_kernels(levels=[0.1, 1, 1000])
def test_top_tokens_settle_ties_by_id(kernels, levels):
    for vocab_size in (7, 700, 6000):
        logits = rows_with_ties(9, vocab_size, levels, seed=3)
        logits[2, 3:] = -np.inf
        expected = [sorted_ids(row)[:20] for row in logits]
        assert top_tokens(logits, 20, rows=np.arange(9), scans=kernels).tolist() == expected
        assert top_tokens(logits, 20, rows=np.array([7, 2]), scans=kernels).tolist() == [
            expected[7],
            expected[2],
        ]


def test_top_tokens_of_a_row_with_fewer_finite_logits_go_on_by_id(kernels):
    logits = np.full((1, 6), -np.inf, dtype=np.float32)
    logits[0, [4, 2]] = 1.0, 2.0
    assert top_tokens(logits, 5, rows=np.arange(1), scans=kernels).tolist() == [[2, 4, 0, 1, 3]]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:overflow")  # of Triton's interpreter
def test_sums_are_exact_and_bit_equal_alone_and_in_company(kernels):
    for vocab_size in (1, 3, 64, 1000, 2048, 70_001):
        rng = np.random.default_rng(vocab_size)
        logits = (rng.normal(size=(17, vocab_size)) * 4).astype(np.float32)
        logits[5, 1:] = -np.inf
        logits[6, 1:] = -3e38
        maxima, temperature = logits.max(axis=1), rng.random(17) + 0.1
        temperature[:3] = 1.0
        temperature[3:5] = 5e-324, 100.0
        together = kernels.sum_exp(logits, maxima, temperature)
        for row in range(len(logits)):
            alone = slice(row, row + 1)
            assert (
                kernels.sum_exp(logits[alone].copy(), maxima[alone], temperature[alone])[0] == together[row]
            )
            assert (
                kernels.sum_exp(logits, maxima[alone], temperature[alone], np.array([row]))[0]
                == together[row]
            )
        with np.errstate(over="ignore"):
            exact = np.exp((logits.astype(np.float64) - maxima[:, None]) / temperature[:, None]).sum(axis=1)
        np.testing.assert_allclose(together, exact, rtol=1e-12)


# In Triton's interpreter, numpy's exponentials would be compared with themselves, for half a minute.
@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "triton"], indirect=True)
def test_exponentials_are_right_to_the_last_bits(kernels):
    depth = np.concatenate([np.linspace(-720, 0, 3001), -np.logspace(-12, 2, 500)])
    rows = np.zeros((len(depth), 2), dtype=np.float32)
    rows[:, 1] = depth
    temperature = np.ones(len(depth))
    sums = kernels.sum_exp(rows[:, 1:], np.zeros(len(depth), dtype=np.float32), temperature)
    exact = np.exp(rows[:, 1].astype(np.float64))
    np.testing.assert_allclose(sums, exact, rtol=5e-16, atol=1e-307)


@pytest.mark.formats
@pytest.mark.first_case
def test_ranks_are_places_in_the_sorted_row(kernels):
    for vocab_size in VOCAB_SIZES:
        logits = rows_with_ties(12, vocab_size, 2)
        token_ids = np.random.default_rng(2).integers(0, vocab_size, 12)
        expected = [sorted_ids(row).index(token) + 1 for row, token in zip(logits, token_ids, strict=True)]
        assert kernels.ranks(logits, token_ids).tolist() == expected
        wider, rows = among_poison(logits)
        assert kernels.ranks(wider, token_ids, rows).tolist() == expected


@pairwise(num_rows=[1, 5])
def test_native_results_do_not_depend_on_the_threads(num_rows):
    logits = rows_with_ties(num_rows, 151_936, 1000)
    temperature, token_ids = np.full(num_rows, 0.7), np.arange(num_rows) * 7

    def results():
        chosen, maxima = native.largest(logits)
        head = native.likeliest(logits)
        sums = native.sum_exp(logits, maxima, temperature)
        parts = chosen, maxima, head.logits, head.token_ids, head.count, sums, native.ranks(logits, token_ids)
        return [part.copy() for part in parts]

    with threads(1):
        alone = results()
    with threads(2):
        for expected, actual in zip(alone, results(), strict=True):
            assert np.array_equal(expected, actual)


def test_what_the_kernels_cannot_take_is_refused():
    logits = np.zeros((3, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="float64"):
        native.largest(logits.astype(np.float64))
    with pytest.raises(ValueError, match="adjacent"):
        native.largest(logits[:, ::2])
    with pytest.raises(ValueError, match="rows is int32"):
        native.largest(logits, np.arange(2, dtype=np.int32))
    with pytest.raises(ValueError, match="maxima is"):
        native.sum_exp(logits, np.zeros(2, dtype=np.float32), np.ones(3))
    with pytest.raises(IndexError, match="from 0 to 699"):
        native.ranks(np.zeros((2, 700), dtype=np.float32), np.array([0, 700]))

import numpy as np
import pytest
import torch

from quire.execution.sampling.rng import uniforms
from quire.kernels.cpu.sampling import NativeScans
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.sampling.selection import Filters, draw
from quire.sampling_params import SamplingParams
from sampling_reference import chosen, kept_weights


def filters_of(params, vocab_size):
    return Filters(
        np.array([p.temperature for p in params]),
        np.array([min(p.top_k or vocab_size, vocab_size) for p in params]),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
    )


def draw_rows(logits, params, numbers):
    """Draw with either kind of kernels, once from rows that lie among others."""
    numbers = np.asarray(numbers, dtype=np.float64)
    filters = filters_of(params, logits.shape[1])
    maxima, rows = logits.max(axis=1), np.arange(len(logits))
    drawn = draw(logits, maxima, filters, numbers, rows=rows, scans=ReferenceScans())
    among_others = np.full((2 * len(logits), logits.shape[1] + 3), np.nan, dtype=np.float32)
    among_others[1::2, :-3] = logits
    native = draw(among_others[:, :-3], maxima, filters, numbers, rows=2 * rows + 1, scans=NativeScans())
    assert native.tolist() == drawn.tolist()
    return drawn


def random_params(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.05, 0.7, 1.0, 3.0])),
        top_k=int(rng.choice([0, 1, 5, 40, 200, 3000])),
        top_p=float(rng.choice([1.0, 0.999, 0.9, 0.3, 1e-6])),
        min_p=float(rng.choice([0.0, 0.0, 1e-4, 0.05, 1.0])),
    )


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("vocab_size", [1, 3, 128, 129, 2100])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_random_rows_draw_what_the_plain_loop_draws(vocab_size, spread):
    rng = np.random.default_rng(vocab_size * 10 + int(spread))
    logits = (np.round(rng.normal(size=(40, vocab_size)) * spread * 32) / 32).astype(np.float32)
    params = [random_params(rng) for _ in logits]
    numbers = rng.random(len(logits))
    expected = [chosen(row, p, u) for row, p, u in zip(logits, params, numbers, strict=True)]
    assert draw_rows(logits, params, numbers).tolist() == expected


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("params", "seed"),
    [
        (SamplingParams(), 1),
        (SamplingParams(temperature=0.4), 2),
        (SamplingParams(temperature=2.0, top_k=9), 3),
        (SamplingParams(top_p=0.8), 4),
        (SamplingParams(min_p=0.1), 5),
        (SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02), 6),
    ],
)
def test_draws_follow_the_distribution(params, seed):
    count = 10_000
    row = np.random.default_rng(7).normal(size=150).astype(np.float32) * 2
    numbers = uniforms(np.full(count, seed, dtype=np.uint64), np.arange(count))
    drawn = draw_rows(np.tile(row, (count, 1)), [params] * count, numbers)
    kept = kept_weights(row, params)
    mass = sum(weight for _, weight in kept)
    counts = np.bincount(drawn, minlength=len(row))
    assert counts[[token for token, _ in kept]].sum() == count  # nothing that a filter drops is drawn
    expected = np.array([weight / mass * count for _, weight in kept])
    observed = counts[[token for token, _ in kept]]
    frequent = expected >= 10
    chi_square = ((observed - expected) ** 2 / expected)[frequent].sum()
    degrees = frequent.sum()
    assert chi_square < degrees + 3.3 * np.sqrt(2 * degrees) + 4  # beyond probability 0.001


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.7), {}),
        (SamplingParams(top_k=7), {"TopKLogitsWarper": 7}),
        (SamplingParams(top_p=0.75), {"TopPLogitsWarper": 0.75}),
        (SamplingParams(min_p=0.08), {"MinPLogitsWarper": 0.08}),
        (SamplingParams(temperature=1.7, min_p=0.03), {"MinPLogitsWarper": 0.03}),
        (
            SamplingParams(temperature=1.3, top_k=30, top_p=0.9),
            {"TopKLogitsWarper": 30, "TopPLogitsWarper": 0.9},
        ),
    ],
)
def test_filters_agree_with_transformers(params, warpers):
    from transformers.generation import logits_process  # takes seconds

    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(60, 500)) * 2).astype(np.float32)
    scores = torch.from_numpy(logits).double()
    for name, number in {"TemperatureLogitsWarper": params.temperature, **warpers}.items():
        scores = getattr(logits_process, name)(number)(None, scores)
    probabilities, ids = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probabilities.cumsum(dim=-1).numpy()
    numbers = rng.random(len(logits))
    places = (cumulative <= numbers[:, None]).sum(axis=1)
    away_from_edges = np.abs(cumulative - numbers[:, None]).min(axis=1) > 1e-6
    expected = ids.numpy()[np.arange(len(logits)), places]
    drawn = draw_rows(logits, [params] * len(logits), numbers)
    assert away_from_edges.mean() > 0.95
    assert drawn[away_from_edges].tolist() == expected[away_from_edges].tolist()


EDGE = np.float64(1 - 2**-53)  # the largest number below 1


@pytest.mark.parametrize("vocab_size", [4, 128, 200, 3000])
@pytest.mark.parametrize("number", [0.0, 0.5, EDGE])
def test_equal_logits_are_ordered_by_token_id(vocab_size, number):
    logits = np.zeros((1, vocab_size), dtype=np.float32)
    assert draw_rows(logits, [SamplingParams()], [number])[0] == int(number * vocab_size)
    top_k = SamplingParams(top_k=3)
    assert draw_rows(logits, [top_k], [number])[0] == int(number * 3)
    half = SamplingParams(top_p=0.5)
    assert draw_rows(logits, [half], [number])[0] == int(number * (vocab_size // 2))


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_banned_tokens_are_never_drawn(vocab_size):
    logits = np.full((3, vocab_size), -np.inf, dtype=np.float32)
    logits[:, 2] = 1.0
    logits[1:, 4] = 0.5
    params = [SamplingParams(), SamplingParams(temperature=50.0), SamplingParams(top_k=5, top_p=0.999)]
    assert draw_rows(logits, params, [EDGE, EDGE, EDGE]).tolist() == [2, 4, 4]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, 900)).astype(np.float32)
    params = [SamplingParams(temperature=temperature)] * len(logits)
    assert draw_rows(logits, params, rng.random(len(logits))).tolist() == logits.argmax(axis=1).tolist()


def test_the_largest_temperature_and_logits_stay_finite():
    logits = np.array([[3e38, -3e38, 1.0]], dtype=np.float32)
    assert draw_rows(logits, [SamplingParams(temperature=100.0)], [EDGE]).tolist() == [0]
    flat = np.zeros((1, 3), dtype=np.float32)
    assert draw_rows(flat, [SamplingParams(temperature=100.0)], [EDGE]).tolist() == [2]


def test_a_filter_that_drops_everything_else_keeps_the_likeliest():
    logits = np.array([[0.0, 1.0, 0.999]], dtype=np.float32)
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)):
        assert draw_rows(logits, [params], [EDGE]).tolist() == [1]

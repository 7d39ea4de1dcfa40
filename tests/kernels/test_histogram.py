import numpy as np
import pytest

from quire.kernels.sampling.selection import draw_from_histogram
from quire.sampling_params import SamplingParams
from sampling_reference import chosen


def draw(row, params, uniform):
    return draw_from_histogram(
        row,
        temperature=np.array([params.temperature]),
        top_k=params.top_k or len(row),
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform,
    )


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("vocab_size", [1, 2, 50, 3000])
@pytest.mark.parametrize("levels", [0.5, 8, 1e6])
def test_rows_draw_what_the_plain_loop_draws(vocab_size, levels):
    rng = np.random.default_rng(vocab_size)
    for _ in range(25):
        row = (np.round(rng.normal(size=vocab_size) * 2 * levels) / levels).astype(np.float32)
        row[1 : vocab_size // 10] = -np.inf
        params = SamplingParams(
            temperature=float(rng.choice([1e-300, 0.1, 1.0, 20.0])),
            top_k=int(rng.choice([0, 1, 30, 700])),
            top_p=float(rng.choice([1.0, 0.97, 0.5, 1e-9])),
            min_p=float(rng.choice([0.0, 0.001, 0.2])),
        )
        uniform = rng.choice([0.0, 1 - 2**-53, rng.random()])
        assert draw(row, params, uniform) == chosen(row, params, uniform)


def test_equal_logits_are_ordered_by_token_id():
    row = np.full(1000, 3.5, dtype=np.float32)
    for uniform in (0.0, 0.2505, 0.75, 1 - 2**-53):
        assert draw(row, SamplingParams(), uniform) == int(uniform * 1000)


def test_an_outlier_far_below_does_not_disturb():
    row = np.array([-3e38, 1.0, 1.0, -np.inf, 1.0], dtype=np.float32)
    assert [draw(row, SamplingParams(), uniform) for uniform in (0.1, 0.5, 0.99)] == [1, 2, 4]

"""Log-probabilities from Triton's kernels are those of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, strided

from quire.kernels.sampling.host_choice import HostChoice
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.triton.sampling.token_choice import TritonChoice
from quire.step import NO_TOKEN

# The interpreter computes in numpy, which warns of numbers that become infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")


def on_device(logits: Any, chosen: Any, count: int, rows: Any) -> list[Any]:
    found = TritonChoice().logprobs(
        strided(torch.from_numpy(logits).to(DEVICE)),
        torch.from_numpy(chosen).to(DEVICE),
        count,
        torch.from_numpy(rows).to(DEVICE),
    )
    return [part.cpu().numpy() for part in (found.token_ids, found.logprobs, found.ranks, found.maxima)]


def logits_of_all_kinds(vocab_size: int) -> Any:
    """Return rows without ties, with some, with too many, with few tokens, and with none of both."""
    logits = np.random.default_rng(vocab_size).normal(size=(7, vocab_size)).astype(np.float32) * 4
    logits[1] = np.round(logits[1])
    logits[2] = 0.25
    logits[2, -2:] = 3.0
    logits[3, 3:] = -np.inf
    logits[4, 100:] = np.round(logits[4, 100:] / 8)
    logits[5, vocab_size // 2] = np.nan
    logits[6] = np.where(logits[6] > 0, 0.0, -0.0)
    return logits


@pytest.mark.parametrize(("vocab_size", "count"), [(1, 1), (60, 20), (1800, 20), (1800, 128), (1800, 0)])
def test_logprobs_are_the_host_s(vocab_size: int, count: int) -> None:
    logits = logits_of_all_kinds(vocab_size)
    rows = np.array([4, 0, 6, 1, 2, 3])
    chosen = np.random.default_rng(1).integers(0, vocab_size, len(rows))
    expected = HostChoice(ReferenceScans()).logprobs(
        *map(torch.from_numpy, (logits, chosen)), count, torch.from_numpy(rows)
    )
    token_ids, logprobs, ranks, maxima = on_device(logits, chosen, count, rows)
    assert token_ids.tolist() == expected.token_ids.tolist()
    assert ranks.tolist() == expected.ranks.tolist()
    assert maxima.tolist() == logits[rows].max(axis=1).tolist()
    assert logprobs.dtype == np.float64
    np.testing.assert_allclose(logprobs, expected.logprobs.numpy(), rtol=1e-13, atol=1e-13)


def test_rows_keep_their_bits_in_any_company() -> None:
    logits, rows = logits_of_all_kinds(1800), np.array([0, 1, 4])
    together = on_device(logits, rows + 7, 5, rows)
    for index, row in enumerate(rows):
        alone = on_device(logits[row : row + 1], rows[index : index + 1] + 7, 5, np.zeros(1, dtype=np.int64))
        for found, expected in zip(alone, together, strict=True):
            assert np.array_equal(found[0], expected[index])


def test_rows_without_a_token_disturb_nobody() -> None:
    logits = logits_of_all_kinds(600)
    logits[6] = np.inf
    chosen, rows = np.array([NO_TOKEN, 5, NO_TOKEN]), np.array([5, 0, 6])
    found = on_device(logits, chosen, 3, rows)
    alone = on_device(logits, chosen[1:2], 3, rows[1:2])
    for all_rows, one in zip(found, alone, strict=True):
        assert np.array_equal(all_rows[1], one[0])
    np.testing.assert_array_equal(found[-1], [np.nan, logits[0].max(), np.inf])
    assert on_device(logits, chosen[:0], 3, rows[:0])[1].shape == (0, 4)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    logits, rows = np.zeros((2, 9), dtype=np.float32), np.arange(2)
    with pytest.raises(ValueError, match="10 of the likeliest tokens are wanted; there are up to 9"):
        on_device(logits, rows, 10, rows)
    with pytest.raises(TypeError, match="chosen is"):
        on_device(logits, rows.astype(np.int32), 1, rows)
    with pytest.raises(TypeError, match="float32"):
        on_device(logits.astype(np.float64), rows, 1, rows)

"""Tokens chosen by Triton's kernels are those that the host's sampler chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, strided

from pairwise import pairwise
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.sampling.selection import Filters, draw
from quire.kernels.sampling.token_choice import RowDraws, TokenChoice
from quire.kernels.triton.sampling import row_scans, tail_search
from quire.kernels.triton.sampling.token_choice import TritonChoice
from quire.step import NO_TOKEN

# The interpreter computes in numpy, which warns of numbers that become infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")

DTYPES = [torch.float64, torch.int64, torch.float64, torch.float64, torch.float64]  # of `RowDraws`
EDGE = np.float64(1 - 2**-53)  # the largest number below 1
host, choice = ReferenceScans(), TritonChoice()


def rows_of_logits(num_rows: int, vocab_size: int, *, spread: float = 3.0, levels: int = 1 << 20) -> Any:
    logits = np.random.default_rng(vocab_size).normal(size=(num_rows, vocab_size)) * spread
    return (np.round(logits * levels) / levels).astype(np.float32)


def on_host(logits: Any, filters: Filters, uniforms: Any) -> tuple[Any, Any]:
    """Choose as `HostChoice` does."""
    token_ids, maxima = host.largest(logits)
    sound = np.isfinite(maxima)
    token_ids[~sound] = NO_TOKEN
    rows = np.flatnonzero(sound & (filters.temperature > 0))
    if rows.size:
        of_rows = Filters(
            filters.temperature[rows], filters.top_k[rows], filters.top_p[rows], filters.min_p[rows]
        )
        token_ids[rows] = draw(logits, maxima[rows], of_rows, uniforms[rows], rows=rows, scans=host)
    return token_ids, maxima


def on_device(logits: Any, filters: Filters, uniforms: Any) -> tuple[Any, Any]:
    parts = (filters.temperature, filters.top_k, filters.top_p, filters.min_p, uniforms)
    draws = RowDraws(*(torch.from_numpy(part).to(DEVICE) for part in parts))
    token_ids, maxima = choice.choose(strided(torch.from_numpy(logits).to(DEVICE)), draws)
    return token_ids.cpu().numpy(), maxima.cpu().numpy()


def assert_chosen_alike(logits: Any, filters: Filters, uniforms: Any) -> None:
    for found, expected in zip(
        on_device(logits, filters, uniforms), on_host(logits, filters, uniforms), strict=True
    ):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected, equal_nan=True)


def filters_of(num_rows: int, vocab_size: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Filters:
    return Filters(
        np.full(num_rows, temperature),
        np.full(num_rows, top_k or vocab_size),
        np.full(num_rows, top_p),
        np.full(num_rows, min_p),
    )


def random_filters(num_rows: int, vocab_size: int) -> Filters:
    rng = np.random.default_rng(num_rows)
    return Filters(
        rng.choice([0.0, 5e-324, 0.05, 0.7, 1.0, 3.0, 100.0], num_rows),
        np.minimum(rng.choice([vocab_size, vocab_size, 1, 5, 40, 200, 900], num_rows), vocab_size),
        rng.choice([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6], num_rows),
        rng.choice([0.0, 0.0, 0.0, 1e-4, 0.05, 1.0], num_rows),
    )


@pairwise(vocab_size=[1, 513, 1301], spread=[0.0, 0.5, 4.0], levels=[32, 1 << 20])
def test_random_rows_draw_what_the_host_draws(vocab_size: int, spread: float, levels: int) -> None:
    logits = rows_of_logits(6, vocab_size, spread=spread, levels=levels)
    logits[::4, : vocab_size // 3] = -np.inf
    uniforms = np.random.default_rng(1).random(6)
    uniforms[:2] = 0.0, 1 - 2**-30
    assert_chosen_alike(logits, random_filters(6, vocab_size), uniforms)


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_p": 0.97}, {"top_k": 1100, "top_p": 0.98}, {"min_p": 1e-4, "temperature": 9.0}],
    ids=str,
)
def test_rows_that_their_likeliest_tokens_do_not_decide(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_search, "SEARCH_PART", 1024)
    logits = rows_of_logits(2, 1501, spread=0.5, levels=64)
    logits[1, :1000] = np.where(logits[1, :1000] > 0, 0.0, -0.0)
    assert_chosen_alike(logits, filters_of(2, 1501, **filters), np.array([0.999, 0.7]))


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2000, "top_p": 0.5}], ids=str
)
def test_equal_logits_are_ordered_by_token_id(filters: dict[str, Any]) -> None:
    logits = np.full((3, 3000), 1.5, dtype=np.float32)
    uniforms = np.array([0.0, 0.5005, EDGE])
    num_kept = int(min(filters.get("top_k", 3000), 3000) * filters.get("top_p", 1.0))
    token_ids, _ = on_device(logits, filters_of(3, 3000, **filters), uniforms)
    assert token_ids.tolist() == [0, int(0.5005 * num_kept), num_kept - 1]


def test_a_nucleus_may_end_between_two_logits() -> None:
    logits = np.full((2, 2200), 1.5, dtype=np.float32)
    logits[:, ::2] = np.nextafter(np.float32(1.5), np.float32(0))  # whose probability is the same number
    token_ids, _ = on_device(logits, filters_of(2, 2200, temperature=1e12, top_p=0.5), np.array([0.0, EDGE]))
    assert token_ids.tolist() == [1, 2199]


def test_a_logit_far_from_all_others_does_not_hide_them() -> None:
    logits = rows_of_logits(2, 1201, spread=1e-6)
    logits[:, 77] = -3e38
    logits[1, :] += 100.0
    assert_chosen_alike(logits, filters_of(2, 1201), np.array([0.9, 0.3]))


def test_a_large_vocabulary() -> None:
    logits = rows_of_logits(2, 151_936, spread=2.0)
    filters = filters_of(2, 151_936)
    filters.top_k[0] = 50
    assert_chosen_alike(logits, filters, np.array([0.5, 0.9]))


@pytest.mark.parametrize("part", [256, 1 << 16])
def test_rows_without_a_finite_logit_have_no_token(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows that one program scans, and in rows of which several do."""
    monkeypatch.setattr(row_scans, "_PART", part)
    logits = rows_of_logits(8, 700)
    logits[0] = -np.inf
    logits[1, 600] = np.inf
    logits[2, 5] = np.nan
    logits[4:7] = logits[:3]
    filters = filters_of(8, 700)
    filters.temperature[4:] = 0.0
    assert_chosen_alike(logits, filters, np.full(8, 0.99))
    greedy, maxima = choice.choose(torch.from_numpy(logits).to(DEVICE))
    expected, largest = on_host(logits, filters_of(8, 700, temperature=0.0), np.zeros(8))
    assert greedy.tolist() == expected.tolist()
    assert np.array_equal(maxima.cpu().numpy(), largest, equal_nan=True)


def test_a_row_s_token_does_not_depend_on_the_others() -> None:
    logits = rows_of_logits(5, 700, spread=1.0)
    filters, uniforms = random_filters(5, 700), np.random.default_rng(0).random(5)
    together, _ = on_device(logits, filters, uniforms)
    for part in (slice(0, 1), slice(2, 5)):
        of_part = Filters(
            filters.temperature[part], filters.top_k[part], filters.top_p[part], filters.min_p[part]
        )
        assert on_device(logits[part], of_part, uniforms[part])[0].tolist() == together[part].tolist()


def test_no_rows_are_no_work() -> None:
    for filters in (None, RowDraws(*(torch.ones(0, device=DEVICE, dtype=dtype) for dtype in DTYPES))):
        token_ids, maxima = choice.choose(torch.ones(0, 9, device=DEVICE), filters)
        assert (token_ids.dtype, token_ids.shape, maxima.shape) == (torch.int64, (0,), (0,))


def test_what_the_kernels_cannot_take_is_refused() -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    ones = [torch.ones(3, device=DEVICE, dtype=dtype) for dtype in DTYPES]
    with pytest.raises(TypeError, match="bfloat16"):
        choice.choose(logits.bfloat16())
    with pytest.raises(ValueError, match="adjacent"):
        choice.choose(logits[:, ::2])
    with pytest.raises(ValueError, match="at least 1 token"):
        choice.choose(logits[:, :0])
    with pytest.raises(TypeError, match="top_k is"):
        choice.choose(logits, RowDraws(ones[0], ones[1].int(), *ones[2:]))
    with pytest.raises(ValueError, match=r"uniforms is \(2,\)"):
        choice.choose(logits, RowDraws(*ones[:4], ones[4][:2]))


@pytest.mark.parametrize("num_tokens", [0, 1, 17, 1025])
def test_token_ids_of_a_step(num_tokens: int) -> None:
    """Those that the host knows, and the last ones of slots."""
    generator = torch.Generator().manual_seed(num_tokens)
    last = torch.randint(0, 150_000, (9,), generator=generator)
    encoded = torch.randint(-9, 150_000, (num_tokens,), generator=generator)
    encoded[::2] = encoded[::2] % 9 - 9
    codes = encoded.tolist()
    expected = torch.tensor([last[-1 - code] if code < 0 else code for code in codes], dtype=torch.int64)
    found = choice.input_ids(encoded.to(DEVICE), last.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(TokenChoice.input_ids(choice, encoded, last), expected)


@pytest.mark.parametrize("num_rows", [0, 1, 17, 1025])
def test_last_tokens_are_kept(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    token_ids = torch.randint(0, 150_000, (num_rows,), generator=generator)
    token_ids[1::3] = NO_TOKEN
    expected = torch.full((num_rows + 3,), 7)
    expected[slots] = token_ids.clamp(min=0)
    for keep_last in (TritonChoice.keep_last, TokenChoice.keep_last):
        last = torch.full((num_rows + 3,), 7, device=DEVICE)
        keep_last(choice, token_ids.to(DEVICE), slots.to(DEVICE), last)
        assert torch.equal(last.cpu(), expected)

"""Masks, bans and biases on the device: tokens and errors of the host's sampler."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, strided

from host_choice import HostSampler
from quire.execution.sampling.constraints import RowMasks
from quire.execution.sampling.rng import uniforms
from quire.kernels.sampling.row_scans import ReferenceScans
from quire.kernels.sampling.token_choice import (
    NUM_EDIT_NUMBERS,
    LogitChanges,
    LogitEdits,
    LogitMasks,
    RowDraws,
)
from quire.kernels.triton.sampling import logit_changes
from quire.kernels.triton.sampling.logit_changes import change_logits
from quire.kernels.triton.sampling.token_choice import TritonChoice
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN

VOCAB_SIZE = 141
ALL_BANNED = tuple((token,) for token in range(VOCAB_SIZE))


def bits(allowed: list[list[int]], num_words: int = 6) -> Any:
    """Return a bitmask that allows the tokens of each list, and all that the vocabulary does not have."""
    flags = np.zeros((len(allowed), num_words * 32), dtype=np.bool_)
    flags[:, VOCAB_SIZE:] = True
    for row, token_ids in enumerate(allowed):
        flags[row, token_ids] = True
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def changes_of(
    bitmask: Any, mask_of_row: list[int], biased: Any = (), banned: Any = (), tokens_before: Any = None
) -> LogitChanges:
    """Return the changes of (row, id, bias), and (row, id) or (row, id, the token before)."""
    edits = [(row, token, bias, NO_TOKEN) for row, token, bias in biased]
    edits += [(row, token, -np.inf, *(before or [NO_TOKEN])) for row, token, *before in banned]
    before = np.zeros(len(mask_of_row)) if tokens_before is None else tokens_before
    masks = bitmask, np.array(mask_of_row, dtype=np.int64)
    numbers = np.array(edits).reshape(-1, NUM_EDIT_NUMBERS).T.copy(), np.array(before, dtype=np.int64)
    return LogitChanges(
        LogitMasks(*(torch.from_numpy(part).to(DEVICE) for part in masks)),
        LogitEdits(*(torch.from_numpy(part).to(DEVICE) for part in numbers)),
    )


@dataclasses.dataclass
class Row:
    """A row of the test: what its request asks for, and what its grammar allows."""

    params: SamplingParams
    allowed: list[int] | None = None


def host_choice(logits: Any, rows: list[Row]) -> tuple[Any, dict[int, str]]:
    sampler = HostSampler(len(rows), VOCAB_SIZE, ReferenceScans())
    for slot, row in enumerate(rows):
        sampler.table.write(slot, row.params, num_prompt_tokens=1, eos_token_ids=(2, 3))
    numbers = np.arange(len(rows))
    masked = [number for number, row in enumerate(rows) if row.allowed is not None]
    mask_of_row = np.full(len(rows), -1)
    mask_of_row[masked] = np.arange(len(masked))
    masks = RowMasks(bits([rows[number].allowed or [] for number in masked]), mask_of_row)
    known = np.ones((len(rows), 4), dtype=np.int32)
    copied = torch.from_numpy(logits.copy())
    sampled = sampler.sample_known(copied, numbers, np.ones_like(numbers), known, masks)
    return sampled.token_ids, sampled.errors


def device_choice(logits: Any, rows: list[Row]) -> tuple[Any, Any]:
    masks: list[list[int]] = []
    mask_of_row, biased, banned = [], [], []
    for number, row in enumerate(rows):
        allowed = set(range(VOCAB_SIZE)) if row.allowed is None else set(row.allowed)
        allowed &= set(row.params.allowed_token_ids or allowed)
        is_masked = row.allowed is not None or row.params.allowed_token_ids
        mask_of_row.append(len(masks) if is_masked else -1)
        masks += [sorted(allowed)] if is_masked else []
        biased += [(number, token, bias) for token, bias in row.params.logit_bias.items()]
        banned += [(number, *sequence) for sequence in row.params.bad_words_token_ids]
        banned += [(number, token) for token in (2, 3, 3) if row.params.min_tokens]
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    ones = torch.ones_like(temperature)
    seeds = np.array([row.params.seed or 0 for row in rows], dtype=np.uint64)
    numbers = torch.from_numpy(uniforms(seeds, np.ones(len(rows), dtype=np.int64)))
    parts = (temperature, (ones * VOCAB_SIZE).long(), ones, ones * 0, numbers)
    token_ids, maxima = TritonChoice().choose(
        strided(torch.from_numpy(logits).to(DEVICE)),
        RowDraws(*(part.to(DEVICE) for part in parts)),
        changes_of(bits(masks), mask_of_row, biased, banned),
    )
    return token_ids.cpu().numpy(), maxima.cpu().numpy()


def test_tokens_and_errors_are_the_host_s() -> None:
    random = SamplingParams(temperature=0.9, seed=5)
    ask = dataclasses.replace
    rows = [
        Row(random),
        Row(random, allowed=[0, 31, 32, 140]),
        Row(SamplingParams(temperature=0.0, logit_bias={3: 50.0, 4: -1.25})),
        Row(ask(random, allowed_token_ids=[9, 77, 2], min_tokens=2), allowed=[77, 2, 5]),
        Row(ask(random, bad_words_token_ids=((5,), (6,)), logit_bias={5: 90.0, 7: 9.0})),
        Row(random, allowed=[]),
        Row(ask(random, bad_words_token_ids=((17,),)), allowed=[17]),
        Row(ask(random, bad_words_token_ids=ALL_BANNED)),
        Row(random, allowed=[4, 5]),
        Row(ask(random, min_tokens=1)),
    ]
    logits = (np.random.default_rng(0).normal(size=(len(rows), VOCAB_SIZE)) * 3).astype(np.float32)
    logits[8, 100] = np.nan
    logits[9, [2, 3]] = 30.0, 31.0
    expected, errors = host_choice(logits, rows)
    token_ids, maxima = device_choice(logits, rows)
    assert token_ids.tolist() == expected.tolist()
    assert sorted(errors) == [5, 6, 8] == np.flatnonzero(token_ids == NO_TOKEN).tolist()
    assert np.isneginf(maxima[[5, 6]]).all()
    assert np.isnan(maxima[8])
    assert token_ids[7] == logits[7].argmax()


def test_changed_logits_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_changes, "_PART", 64)
    monkeypatch.setattr(logit_changes, "_EDITS", 4)
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, VOCAB_SIZE)).astype(np.float32)
    allowed = [rng.choice(VOCAB_SIZE, 50, replace=False).tolist() for _ in range(3)]
    mask_of_row = [2, -1, 0, -1]
    biased = [(row, token, rng.normal() * 10) for row in range(4) for token in (0, 5, 139, 140)]
    tokens_before = [7, 7, 0, 140]
    banned = [(1, 140), (1, 140), (3, 0), (0, 5), (2, 7), (1, 1)]
    banned_behind = [(1, 9, 7), (2, 9, 7), (3, 9, 140), (3, 8, 0), (2, 8, 0), (3, 139, 140)]
    no_edit = [(-1, 10**6, 3.0)]
    expected = logits.copy()
    for row, mask in enumerate(mask_of_row):
        if mask >= 0:
            expected[row, sorted(set(range(VOCAB_SIZE)) - set(allowed[mask]))] = -np.inf
    for row, token, bias in biased:
        expected[row, token] += np.float32(bias)
    for row, token in [*banned, (1, 9), (3, 9), (2, 8), (3, 139)]:
        expected[row, token] = -np.inf
    changed = strided(torch.from_numpy(logits).to(DEVICE))
    edits = [*biased, *no_edit], [*banned, *banned_behind]
    change_logits(changed, changes_of(bits(allowed), mask_of_row, *edits, tokens_before))
    assert np.array_equal(changed.cpu().numpy(), expected)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2 * VOCAB_SIZE + 3])
def test_edits_of_tokens_that_there_are_not_change_nobody_s_logits(token: int) -> None:
    logits = torch.zeros(5, VOCAB_SIZE, device=DEVICE)
    change_logits(logits[1:3], changes_of(bits([]), [-1, -1], [(0, token, 2.0)], [(1, token)]))
    assert (logits == 0).all()


def test_nothing_to_change_changes_nothing() -> None:
    logits = torch.ones(2, VOCAB_SIZE, device=DEVICE)
    change_logits(logits, changes_of(bits([]), [-1, -1]))
    assert (logits == 1).all()
    assert TritonChoice().choose(logits[:0], None, changes_of(bits([]), []))[0].shape == (0,)


def test_biases_without_masks() -> None:
    logits = torch.zeros(2, VOCAB_SIZE, device=DEVICE)
    change_logits(logits, dataclasses.replace(changes_of(bits([]), [-1, -1], [(1, 7, 2.0)]), masks=None))
    assert logits.sum() == logits[1, 7] == 2


def test_masks_of_no_row() -> None:
    logits = torch.ones(2, VOCAB_SIZE, device=DEVICE)
    no_masks = torch.from_numpy(np.empty((0, 6), dtype=np.int32)).to(DEVICE)  # whose strides are 0
    change_logits(logits, LogitChanges(LogitMasks(no_masks, torch.full((2,), -1, device=DEVICE))))
    assert (logits == 1).all()


def test_what_the_kernels_cannot_take_is_refused() -> None:
    logits = torch.ones(2, VOCAB_SIZE, device=DEVICE)
    good = changes_of(bits([[1]]), [0, -1], [(0, 1, 2.0)], [(0, 1)])
    masks, edits = good.masks, good.edits
    assert masks is not None
    assert edits is not None
    for field, value, problem in [
        ("bitmask", masks.bitmask[:, :4], "5 columns"),
        ("bitmask", masks.bitmask.long(), "bitmask is"),
        ("mask_of_row", masks.mask_of_row[:1], "mask_of_row is"),
    ]:
        with pytest.raises((TypeError, ValueError), match=problem):
            change_logits(logits, LogitChanges(dataclasses.replace(masks, **{field: value})))
    for field, value, problem in [
        ("numbers", edits.numbers.float(), "numbers is"),
        ("numbers", edits.numbers[:3], "numbers is"),
        ("numbers", edits.numbers.T.contiguous().T, "contiguous"),
        ("tokens_before", edits.tokens_before[:1], "tokens_before is"),
    ]:
        with pytest.raises((TypeError, ValueError), match=problem):
            change_logits(logits, LogitChanges(None, dataclasses.replace(edits, **{field: value})))

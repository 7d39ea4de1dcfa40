"""Penalties on the device: the host's, bit for bit, as the outputs grow."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from triton_inputs import DEVICE, strided

from host_choice import penalized
from quire.kernels.sampling.seen_tokens import SeenTokens
from quire.kernels.sampling.token_choice import RowPenalties
from quire.kernels.triton.sampling import penalties as penalties_on_device
from quire.kernels.triton.sampling.penalties import penalize
from quire.kernels.triton.sampling.token_choice import TritonChoice
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN

VOCAB_SIZE = 77
PARAMS = [
    SamplingParams(repetition_penalty=1.37, frequency_penalty=0.31, presence_penalty=-0.7),
    SamplingParams(),
    SamplingParams(repetition_penalty=0.9),
    SamplingParams(frequency_penalty=1.9, presence_penalty=0.123),
]


def ids(rng: Any, count: int) -> Any:
    return rng.integers(0, VOCAB_SIZE, count).astype(np.int32)


def rows_of(seen: SeenTokens, params: list[SamplingParams], slots: list[int]) -> RowPenalties:
    numbers = [
        [getattr(row, f"{name}_penalty") for row in params]
        for name in ("repetition", "frequency", "presence")
    ]
    in_float32 = (torch.tensor(of_rows, dtype=torch.float32, device=DEVICE) for of_rows in numbers)
    return RowPenalties(seen.counts, torch.tensor(slots, device=DEVICE), *in_float32)


@pytest.mark.parametrize(("max_model_len", "dtype"), [(16_383, torch.int16), (16_384, torch.int32)])
def test_penalties_are_the_host_s_as_outputs_grow(
    max_model_len: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penalties_on_device, "_PART", 32)
    rng = np.random.default_rng(3)
    seen, slots = SeenTokens(6, VOCAB_SIZE, max_model_len, DEVICE), [4, -1, 0, 2]
    assert seen.counts.dtype == dtype
    prompts, outputs = [ids(rng, 9) for _ in PARAMS], [ids(rng, 5) for _ in PARAMS]
    outputs[3] = np.full(max_model_len - 50, 70, dtype=np.int32)  # as often as can be
    for slot, prompt, output in zip(slots, prompts, outputs, strict=True):
        if slot >= 0:
            seen.open(slot, ids(rng, 20), ids(rng, 20))  # a request that had the slot before
            seen.open(slot, prompt, output)
    for _ in range(3):
        logits = (rng.normal(size=(4, VOCAB_SIZE)) * 3).astype(np.float32)
        logits[:, ::5] = -np.inf
        expected = logits.copy()
        for row, params in enumerate(PARAMS):
            if slots[row] >= 0:
                expected[row] = penalized(logits[row], params, prompts[row], outputs[row])
        changed = strided(torch.from_numpy(logits).to(DEVICE))
        penalize(changed, rows_of(seen, PARAMS, slots))
        assert np.array_equal(changed.cpu().numpy().view(np.int32), expected.view(np.int32))
        chosen = rng.integers(0, 9, 4)
        chosen[2] = NO_TOKEN
        seen.add(torch.tensor(slots, device=DEVICE), torch.from_numpy(chosen).to(DEVICE))
        outputs = [
            output if token == NO_TOKEN else np.append(output, token).astype(np.int32)
            for output, token in zip(outputs, chosen, strict=True)
        ]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_drafts_have_been_seen_by_the_rows_behind_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penalties_on_device, "_PART", 32)
    rng = np.random.default_rng(4)
    seen = SeenTokens(1, VOCAB_SIZE, 99 if dtype == torch.int16 else 10**6, DEVICE)
    prompt, output = ids(rng, 9), ids(rng, 5)
    seen.open(0, prompt, output)
    drafts = [int(prompt[0]), 70, 70]  # seen before, new, and again
    logits = (rng.normal(size=(5, VOCAB_SIZE)) * 3).astype(np.float32)
    expected = logits.copy()
    for row in range(4):
        expected[row] = penalized(logits[row], PARAMS[0], prompt, [*output, *drafts[:row]])
    table = [[*reversed(drafts[:row]), *[NO_TOKEN] * (3 - row)] for row in range(4)] + [[NO_TOKEN] * 3]
    rows = rows_of(seen, [PARAMS[0]] * 4 + [SamplingParams()], [0, 0, 0, 0, -1])
    rows = dataclasses.replace(rows, drafts=torch.tensor(table, device=DEVICE))
    changed = torch.from_numpy(logits).to(DEVICE)
    penalize(changed, rows)
    assert np.array_equal(changed.cpu().numpy().view(np.int32), expected.view(np.int32))


def test_tokens_are_chosen_after_penalties() -> None:
    logits = torch.zeros(2, VOCAB_SIZE, device=DEVICE)
    logits[:, [5, 6]] = torch.tensor([2.0, 1.5], device=DEVICE)
    seen = SeenTokens(1, VOCAB_SIZE, 99, DEVICE)
    seen.open(0, np.array([5], dtype=np.int32), np.array([], dtype=np.int32))
    penalties = rows_of(seen, [SamplingParams(repetition_penalty=2.0)] * 2, [0, -1])
    token_ids, maxima = TritonChoice().choose(logits, penalties=penalties)
    assert (token_ids.tolist(), maxima.tolist()) == ([6, 5], [1.5, 2.0])


def test_what_the_kernel_cannot_take_is_refused() -> None:
    logits, seen = torch.zeros(2, VOCAB_SIZE, device=DEVICE), SeenTokens(1, VOCAB_SIZE, 99, DEVICE)
    good = rows_of(seen, [SamplingParams()] * 2, [0, -1])
    for field, value, problem in [
        ("seen", seen.counts[:, :9], "77 columns"),
        ("seen", seen.counts.long(), "seen is torch"),
        ("seen_of_row", good.seen_of_row[:1], "seen_of_row is"),
        ("presence", good.presence.double(), "presence is"),
        ("drafts", torch.zeros(1, 3, dtype=torch.int64, device=DEVICE), "drafts are"),
    ]:
        with pytest.raises((TypeError, ValueError), match=problem):
            penalize(logits, dataclasses.replace(good, **{field: value}))

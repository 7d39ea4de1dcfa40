"""Rotary frequencies and tables against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.config import RopeConfig
from quire.models.ropes import read_rope
from quire.models.rotary import CHUNK, RotaryTable, inverse_frequencies

MAX_LEN = 4096
HEAD_DIM = 64
FACTORS = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [2 * factor for factor in FACTORS],
    "short_factor": FACTORS,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        ({"rope_type": "linear", "factor": 2.5}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 3 * MAX_LEN),
        (LLAMA3, None),
        (YARN, None),
        (YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3}, None),
        (YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, None),
        (LONGROPE, None),
        (LONGROPE | {"factor": 8.0}, None),
        (LONGROPE | {"original_max_position_embeddings": MAX_LEN}, None),
    ],
)
def test_frequencies_equal_transformers(parameters: dict[str, Any], length: int | None) -> None:
    # transformers takes seconds to import, in each process that collects this module
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_theta": 5e4, **parameters},
    )
    served = length or MAX_LEN
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, seq_len=served)
    rope = read_rope(hf.to_dict(), HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(rope, served), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_longrope_short_factors_for_a_short_model() -> None:
    rope = RopeConfig(
        kind="longrope", rotary_dim=4, original_max_len=100, short_factors=(1.0, 2.0), long_factors=(3.0, 4.0)
    )
    plain = inverse_frequencies(RopeConfig(rotary_dim=4), 100)
    assert torch.equal(inverse_frequencies(rope, 100), plain / torch.tensor([1.0, 2.0]))
    assert torch.equal(inverse_frequencies(rope, 101), plain / torch.tensor([3.0, 4.0]))


def test_rows_do_not_depend_on_when_they_are_asked_for() -> None:
    rope = RopeConfig(rotary_dim=32)
    grown, at_once = RotaryTable(rope, 9999), RotaryTable(rope, 9999)
    positions = torch.arange(0, 3 * CHUNK, 7)
    pieces = [grown.rows(part, last=int(part[-1])) for part in positions.split(100)]
    cos, sin = at_once.rows(positions, last=int(positions[-1]))
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), cos)
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), sin)
    angles = positions[:, None].double() / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(cos.double(), angles.cos(), atol=2e-3, rtol=0)


def test_no_positions() -> None:
    cos, _ = RotaryTable(RopeConfig(rotary_dim=8), 10).rows(torch.empty(0, dtype=torch.int64), last=-1)
    assert cos.shape == (0, 4)

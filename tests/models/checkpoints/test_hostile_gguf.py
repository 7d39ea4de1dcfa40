"""GGUF files that are made to do harm: metadata with wrong values, and headers that promise too much."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hostile_values import PYTHON_BYTES, make_gguf_model, put_wrong_values, read_all, read_within_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.tokenizers.reading import read_tokenizer


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf_model(tmp_path_factory.mktemp("hostile") / "model")


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_wrong_values_in_gguf_metadata(
    gguf_file: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chosen = random.Random(seed)
    values = dict(GGUFFile(gguf_file).metadata)
    put_wrong_values(values, chosen)
    changed = tmp_path_factory.getbasetemp() / "metadata.gguf"
    _rewrite_gguf(gguf_file, changed, values)
    read_within_memory(changed)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.embedding_length", None, "no llama.embedding_length; it must be an integer from 1"),
        (
            "llama.embedding_length",
            ["x", "y"],
            r"llama.embedding_length is \['x', 'y'\]; it must be an integer",
        ),
        ("tokenizer.ggml.eos_token_id", ["x"], "eos_token_id"),
        ("llama.context_length", math.nan, "llama.context_length is nan; it must be"),
        ("llama.rope.dimension_count", "x", "llama.rope.dimension_count is 'x'; it must be an integer"),
        ("llama.rope.scaling.type", 3, "llama.rope.scaling.type is 3; it must be a text"),
        ("general.architecture", "x" * 5000, "holds the architecture x{100}; Quire reads"),
        ("tokenizer.ggml.eos_token_id", 2**32 - 1, "eos_token_id has 4294967295, not a token id"),
        ("tokenizer.ggml.token_type", [9] * 512, "token_type has 9; token types are 0 to 6"),
        ("tokenizer.ggml.token_type", [1], "token_type has 1 values; one is needed for each of the"),
        ("tokenizer.ggml.token_type", ["x"], "token_type has values of another type than int"),
        ("tokenizer.ggml.model", "x" * 5000, "has a tokenizer of the model x{100}; Quire builds"),
    ],
)
def test_an_error_names_the_gguf_file_and_the_key(
    key: str, value: object, message: str, gguf_file: Path, tmp_path: Path
) -> None:
    values = GGUFFile(gguf_file).metadata | {key: value}
    if key == "tokenizer.ggml.token_type" and isinstance(value, list) and len(value) > 1:
        values[key] = value[:1] * len(values["tokenizer.ggml.tokens"])
    changed = tmp_path / "changed.gguf"
    _rewrite_gguf(gguf_file, changed, {key: value for key, value in values.items() if value is not None})
    with pytest.raises(ModelError, match=f"{changed}.*{message}"):
        read_all(changed)


def test_more_heads_than_features_are_named(gguf_file: Path, tmp_path: Path) -> None:
    values = GGUFFile(gguf_file).metadata | {
        "llama.attention.head_count": 128,
        "llama.rope.dimension_count": 16,
    }
    values.pop("llama.attention.key_length", None)
    changed = tmp_path / "changed.gguf"
    _rewrite_gguf(gguf_file, changed, values)
    with pytest.raises(ModelError, match=f"{changed}.*num_attention_heads 128 and hidden_size 64"):
        read_model_config(changed)


def test_scores_of_a_gguf_tokenizer_are_numbers(gguf_file: Path, tmp_path: Path) -> None:
    tokens = GGUFFile(gguf_file).entries("tokenizer.ggml.tokens", str)
    for scores, message in (([math.nan] * len(tokens), "scores has NaN"), ([0.0], "scores has 1 values")):
        values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        _rewrite_gguf(gguf_file, tmp_path / "scores.gguf", GGUFFile(gguf_file).metadata | values)
        with pytest.raises(ModelError, match=message):
            read_tokenizer(tmp_path / "scores.gguf")


def _rewrite_gguf(source: Path, target: Path, values: dict[str, Any]) -> None:
    """Write a GGUF file with the tensors of another and metadata of one's own."""
    file = GGUFFile(source)
    alignment = 32
    first = min(info.start for info in file.tensors.values())
    entries = [_text(key) + _gguf_value(value) for key, value in values.items()]
    tensors = b"".join(
        _tensor(name, info.start - first, *info.shape[::-1], kind=info.kind)
        for name, info in file.tensors.items()
    )
    header = _gguf(*entries, num_tensors=len(file.tensors), tensors=tensors)
    target.write_bytes(header + bytes(-len(header) % alignment) + file.data[first:])


def _gguf_value(value: Any) -> bytes:
    """Return a kind and what follows it; an object, which GGUF does not have, is an array of its keys."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        kind, form = (11, "<q") if value < 0 else (10, "<Q")
        return struct.pack("<I", kind) + struct.pack(form, max(-(2**63), min(value, 2**64 - 1)))
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    inner = [_gguf_value(item) for item in value or ()]
    kind = inner[0][:4] if inner else struct.pack("<I", 8)
    same = [item[4:] for item in inner if item[:4] == kind]
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(same)) + b"".join(same)


def _gguf(
    *entries: bytes, num_entries: int | None = None, num_tensors: int = 0, tensors: bytes = b""
) -> bytes:
    count = len(entries) if num_entries is None else num_entries
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(entries) + tensors


def _text(text: str) -> bytes:
    octets = text.encode()
    return struct.pack("<Q", len(octets)) + octets


def _tensor(name: str, start: int, *shape: int, kind: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


_TEXTS = _text("c") + struct.pack("<IIQ", 9, 8, 2**21 - 2**10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_gguf(num_entries=2**63), "promises"),
        (_gguf(num_tensors=2**63), "promises"),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 0, 2**60)), "numbers; 8388608 are read"),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 8, 2**21)), "go beyond"),
        (
            _gguf(*(_text(key) + struct.pack("<IIQ", 9, 8, 2**10) + bytes(2**13) for key in "ab"), _TEXTS),
            "texts;",
        ),
        (
            _gguf(_text("a") + struct.pack("<IIQ", 9, 9, 2**13) + bytes(12 << 13)),
            "8192 arrays; 4096 are read",
        ),
        (
            _gguf(
                _text("a")
                + struct.pack("<IIQ", 9, 9, 2)
                + (struct.pack("<IQ", 9, 2**11) + bytes(12 << 11)) * 2
            ),
            "2048 arrays; 4096 are read",
        ),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 9, 1) * 9), "within each other"),
        (_gguf(struct.pack("<Q", 2**63)), "go beyond"),
        (_gguf(_text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (_gguf(_text("general.alignment") + struct.pack("<I", 8) + _text("x")), "general.alignment is 'x'"),
        (_gguf(num_tensors=1, tensors=_tensor("t", 8, 1) + bytes(100)), "not a multiple of 32"),
        (_gguf(num_tensors=1, tensors=_tensor("t", 0, 2**31, 2**31) + bytes(100)), "ends within t"),
        (_gguf(num_tensors=1, tensors=_tensor("t", 2**62, 0) + bytes(100)), "ends within t"),
        (_gguf(num_tensors=2, tensors=_tensor("t", 0, 9) + _tensor("u", 32, 1) + bytes(200)), "within t"),
        (_gguf(num_tensors=2, tensors=_tensor("t", 0, 1) * 2 + bytes(200)), "same name"),
    ],
)
def test_gguf_headers_promise_no_more_than_there_is(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        read_model_config(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PYTHON_BYTES

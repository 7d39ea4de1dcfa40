"""Files that are made to do harm, or are damaged: each is a `ModelError`, and none takes much memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from copy import deepcopy as copy_of
from pathlib import Path
from typing import Any

import pytest
from gguf_checkpoints import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_tokenizer
from quire.errors import ModelError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.safetensors import INDEX_FILE, SINGLE_FILE, weight_files
from quire.models.checkpoints.tokenizer_reading import MAX_TEMPLATE_BYTES, read_tokenizer
from quire.models.weights import weight_specs

PYTHON_BYTES = 64 << 20  # that reading a file of some hundred kB may take
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX_FILE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two shards and all that may be beside them."""
    path = make_checkpoint("llama-3.1", tmp_path_factory.mktemp("hostile") / "model")
    make_tokenizer(path)
    tensors = load_file(path / SINGLE_FILE)
    names = sorted(tensors)
    weight_map = {}
    for number in range(2):
        weight_map |= dict.fromkeys(names[number::2], f"model-{number}.safetensors")
        save_file({name: tensors[name] for name in names[number::2]}, path / f"model-{number}.safetensors")
    (path / SINGLE_FILE).unlink()
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "model"
    make_checkpoint("llama-3.1", path, intermediate_size=128)
    make_tokenizer(path)
    return write_gguf(path, "llama-3.1", "Q8_0", has_tokenizer=True)[0]


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def read_all(path: Path) -> None:
    """Read everything of a model as a start does."""
    config = read_model_config(path)
    with Checkpoint(path) as checkpoint:
        specs = list(weight_specs(config))
        checkpoint.check_names(specs, config)
        for spec in specs:
            for source in spec.sources:
                checkpoint.tensor(source)
    read_tokenizer(path)


def test_what_is_read_here_is_a_model(model: Path, gguf_file: Path) -> None:
    read_all(model)
    read_all(gguf_file)


def _link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-0.safetensors", INDEX_FILE])
@pytest.mark.parametrize("target", ["/etc/hostname", "../other", "/dev/zero", "loop", "missing"])
def test_links_that_leave_the_directory_are_refused(name: str, target: str, copy: Path) -> None:
    (copy.parent / "other").write_text("{}")
    _link(copy / name, name if target == "loop" else target)
    with pytest.raises(ModelError):
        read_all(copy)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model-0.safetensors"]
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_read(name: str, make: Callable[[Path], None], copy: Path) -> None:
    (copy / name).unlink(missing_ok=True)
    make(copy / name)
    with pytest.raises(ModelError, match="no regular file"):
        read_all(copy)


@pytest.mark.parametrize(
    "name",
    ["../model-0.safetensors", "/etc/passwd", "a/../../x", "nul\0byte", 3, None, ["x"], "x" * 5000, "\ud800"],
)
def test_an_index_names_files_of_its_directory(name: object, copy: Path) -> None:
    shutil.copy(copy / "model-0.safetensors", copy.parent)
    index = json.loads((copy / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (copy / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError):
        read_all(copy)


def test_a_snapshot_of_the_hub_links_to_its_blobs(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    shutil.copytree(model, snapshot)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(tmp_path / "models--a--b" / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    read_all(snapshot)
    assert len(list(weight_files(snapshot))) == 2


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    save_file(load_file(copy / "model-1.safetensors"), copy / "model-0.safetensors")
    with pytest.raises(ModelError, match="another file of the model holds too"):
        read_all(copy)


def test_json_that_is_nested_too_deep_or_too_long_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ModelError, match="JSON"):
        read_all(copy)
    with (copy / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="bytes; at most"):
        read_all(copy)


@pytest.mark.parametrize(
    "template", [3, ["x"], [{"name": "default", "template": 3}], "x" * (MAX_TEMPLATE_BYTES + 1)]
)
def test_a_chat_template_is_a_text_of_bounded_length(template: object, copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if template == ["x"]:
        assert not read_tokenizer(copy).has_chat_template
        return
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        read_tokenizer(copy)


NUMBERS = [0, -1, 1, 7, 2**31, 2**32 - 1, 2**63, 10**30, 1e308, float("nan"), float("inf")]
OTHERS = [True, None, "x", [], {}, [[]]]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_wrong_values_in_json(model: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    chosen = random.Random(seed)
    name = chosen.choice(JSON_FILES)
    path = tmp_path_factory.getbasetemp() / "json"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for file in model.iterdir():
        os.link(file, path / file.name)
    values = json.loads((path / name).read_text())
    for _ in range(chosen.randint(1, 3)):
        holder, key = _place(values, chosen)
        holder[key] = copy_of(chosen.choice([*NUMBERS, *OTHERS]))
    (path / name).unlink()
    (path / name).write_text(json.dumps(values))
    _read_within_memory(path)


def _place(values: Any, chosen: random.Random) -> tuple[Any, Any]:
    """Return a container somewhere in `values` and one of its keys."""
    while True:
        key = chosen.choice(list(values)) if isinstance(values, dict) else chosen.randrange(len(values))
        inner = values[key]
        if not isinstance(inner, dict | list) or not inner or chosen.random() < 0.3:
            return values, key
        values = inner


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), is_gguf=st.booleans())
def test_damaged_bytes(
    model: Path, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, is_gguf: bool
) -> None:
    chosen = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "bytes"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    if is_gguf:
        damaged = path / "model.gguf"
        shutil.copy(gguf_file, damaged)
    else:
        for file in model.iterdir():
            os.link(file, path / file.name)
        damaged = path / "model-0.safetensors"
        content = damaged.read_bytes()
        damaged.unlink()
        damaged.write_bytes(content)
    _damage(damaged, chosen)
    _read_within_memory(damaged if is_gguf else path)


def _damage(file: Path, chosen: random.Random) -> None:
    content = bytearray(file.read_bytes())
    header = min(len(content), 12_000)
    for _ in range(chosen.randint(1, 4)):
        place = chosen.randrange(header)
        kind = chosen.randrange(4)
        if kind == 0:
            content[place] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            number = chosen.choice([0, 1, 2**16, 2**31, 2**40, 2**62, 2**64 - 1])
            content[place : place + 8] = struct.pack("<Q", number)
        elif kind == 2:
            content[place : place + 4] = chosen.randbytes(4)
        else:
            del content[chosen.randrange(len(content)) :]
            header = max(1, min(header, len(content)))
            content = content or bytearray(1)
    file.write_bytes(content)


def _read_within_memory(path: Path) -> None:
    tracemalloc.start()
    try:
        read_all(path)
    except ModelError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PYTHON_BYTES


def _gguf(
    *entries: bytes, num_entries: int | None = None, num_tensors: int = 0, tensors: bytes = b""
) -> bytes:
    count = len(entries) if num_entries is None else num_entries
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(entries) + tensors


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str, start: int, *shape: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, start)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_gguf(num_entries=2**63), "promises"),
        (_gguf(num_tensors=2**63), "promises"),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 0, 2**60)), "values"),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 8, 2**22)), "go beyond"),
        (_gguf(_text("a") + struct.pack("<IIQ", 9, 9, 1) * 9), "within each other"),
        (_gguf(struct.pack("<Q", 2**63)), "go beyond"),
        (_gguf(_text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (_gguf(_text("general.alignment") + struct.pack("<I", 8) + _text("x")), "general.alignment is 'x'"),
        (_gguf(num_tensors=1, tensors=_tensor("t", 8, 1) + bytes(100)), "no multiple of 32"),
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

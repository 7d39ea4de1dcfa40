"""Files that are made to do harm, or are damaged: each is a `ModelError`, and none takes much memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_values import LONGEST_ERROR, make_gguf_model, put_wrong_values, read_all, read_within_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_tokenizer
from quire.errors import ModelError
from quire.models.checkpoints.model_files import INDEX_FILE, SINGLE_FILE
from quire.models.checkpoints.safetensors import weight_files
from quire.models.checkpoints.tokenizers.reading import MAX_TEMPLATE_BYTES, read_tokenizer

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    INDEX_FILE,
)


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
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "a": "b"}))
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


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
    with pytest.raises(ModelError, match="not a regular file"):
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
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: the chat template"):
        read_tokenizer(copy)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "eos_token", 3),
        ("tokenizer_config.json", "bos_token", {"content": ["<s>"]}),
        ("tokenizer_config.json", "eos_token", "\ud800"),
        ("tokenizer_config.json", "bos_token", {"content": "a\udfff"}),
        ("special_tokens_map.json", "pad_token", ["</s>"]),
        ("special_tokens_map.json", "unk_token", "x" * 5000),
        ("generation_config.json", "eos_token_id", 2**32 - 1),
        ("generation_config.json", "eos_token_id", "x" * 5000),
        ("config.json", "eos_token_id", [1.0]),
        (INDEX_FILE, "weight_map", ["x" * 5000]),
    ],
)
def test_an_error_names_the_file_and_the_key(name: str, key: str, value: object, copy: Path) -> None:
    values = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
    (copy / name).unlink(missing_ok=True)
    (copy / name).write_text(json.dumps(values | {key: value}))
    with pytest.raises(ModelError, match=rf"{name}: {key} (is|has) ") as caught:
        read_all(copy)
    assert len(str(caught.value)) < LONGEST_ERROR


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
    put_wrong_values(values, chosen)
    (path / name).unlink()
    (path / name).write_text(json.dumps(values))
    read_within_memory(path)


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
    read_within_memory(damaged if is_gguf else path)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_wrong_values_in_a_safetensors_header(
    model: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chosen = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "header"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for file in model.iterdir():
        os.link(file, path / file.name)
    damaged = path / "model-0.safetensors"
    content = damaged.read_bytes()
    damaged.unlink()
    (length,) = struct.unpack_from("<Q", content)
    values = json.loads(content[8 : 8 + length])
    put_wrong_values(values, chosen)
    header = json.dumps(values).encode()
    damaged.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    read_within_memory(path)


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

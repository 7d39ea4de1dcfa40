"""The cache of packed weights: the same bits, nothing read twice, and no harm from any state of its files."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_checkpoints import write_gguf
from quantized_checkpoints import gptq, int_quantized, random_steps, write_quantized
from safetensors.torch import load_file, save

from checkpoints import make_checkpoint
from paged_harness import generate, random_prompts
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.devices.memory import WeightMemory
from quire.models.checkpoints import weight_cache
from quire.models.checkpoints.cached_weights import CachedWeights, FilledMemory
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.checkpoints.weight_cache import WeightCache, cache_key, choose_cache
from quire.models.weights import WeightSource

MATRICES = [
    WeightSource(f"model.layers.{layer}.self_attn.{name}_proj.weight", (64, 64))
    for layer in (0, 1)
    for name in "qkv"
]
ROWS = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
GB = 1_000_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("cached") / "model")


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", GB)


class _Unreadable(Checkpoint):
    """Fails as soon as a matrix is read."""

    def weight(self, source: WeightSource) -> Any:
        raise AssertionError(f"{source.name} was read")


def _load(weights: CachedWeights, quantization: str) -> list[torch.Tensor]:
    """Return each matrix's products with `ROWS`, and give the cache a chance to write."""
    results = []
    for source in MATRICES:
        layer = PackedLinear(
            weights.matrix([source]),
            dtype=torch.float32,
            quantization=quantization,
            group_size=32,
            memory=weights.memory,
        )
        weights.release(source)
        results.append(layer(ROWS))
    weights.save()
    return results


def _start(
    model: Path, cache: WeightCache, *, quantization: str = "int8", kind: type[Checkpoint] = Checkpoint
) -> tuple[bool, list[torch.Tensor]]:
    """Return whether the cache was of use, and the products."""
    with kind(model) as checkpoint:
        weights = CachedWeights(checkpoint, cache, cache_key(model, quantization=quantization))
        return weights.memory.is_filled, _load(weights, quantization)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_second_start_has_the_same_bits_and_reads_no_matrix(
    model: Path, cache: WeightCache, quantization: str
) -> None:
    was_filled, first = _start(model, cache, quantization=quantization)
    is_filled, second = _start(model, cache, quantization=quantization, kind=_Unreadable)
    assert (was_filled, is_filled) == (False, True)
    assert _equal(first, second)


def test_matrices_that_are_not_packed_are_read_from_the_checkpoint(model: Path, cache: WeightCache) -> None:
    norm = WeightSource("model.norm.weight", (64,))
    for _ in range(2):
        with Checkpoint(model) as checkpoint:
            weights = CachedWeights(checkpoint, cache, "key")
            (first,) = weights.matrix(MATRICES[:1])  # another kind of layer takes it
            weights.release(MATRICES[0])
            assert not first.is_meta
            assert torch.equal(weights.tensor(norm), checkpoint.tensor(norm))
            packed = PackedLinear(weights.matrix(MATRICES[1:2]), dtype=torch.float32, memory=weights.memory)
            wanted = checkpoint.weight(MATRICES[1])
            torch.testing.assert_close(packed(ROWS), ROWS @ wanted.T)
            weights.save()


def _damages() -> Iterator[Any]:
    yield pytest.param(lambda data: b"", id="empty")
    yield pytest.param(lambda data: data[: len(data) // 2], id="half")
    yield pytest.param(lambda data: data[:-1], id="one byte short")
    yield pytest.param(lambda data: data[64:], id="start missing")
    yield pytest.param(lambda data: data.replace(b"int8", b"int4").replace(b"float", b"gloat"), id="forms")
    yield pytest.param(lambda data: data.replace(b"manifest", b"manifesu"), id="manifest")
    yield pytest.param(lambda data: b"\xff" * 8 + data[8:], id="header's length")
    yield pytest.param(lambda data: bytes(len(data)), id="zeros")
    yield pytest.param(lambda data: save({"weight": torch.ones(3)}), id="another safetensors file")


@pytest.mark.parametrize("damage", list(_damages()))
def test_damaged_files_are_written_anew(model: Path, cache: WeightCache, tmp_path: Path, damage: Any) -> None:
    _, wanted = _start(model, cache)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    was_filled, found = _start(model, cache)
    assert not was_filled
    assert _equal(found, wanted)
    assert file.read_bytes() == whole
    assert _start(model, cache)[0]


@pytest.mark.parametrize("setting", [{"quantization": "int4"}, {"isa": "avx2"}])
def test_other_settings_have_another_key(model: Path, setting: dict[str, str]) -> None:
    assert cache_key(model, quantization="int8", isa="avx512") != cache_key(
        model, **{"quantization": "int8", "isa": "avx512"} | setting
    )


def test_a_changed_checkpoint_has_another_key(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    keys = [cache_key(path)]
    file = path / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    keys.append(cache_key(path))
    file.rename(tmp_path / "other")
    file.write_bytes((tmp_path / "other").read_bytes())
    os.utime(file, ns=(0, (tmp_path / "other").stat().st_mtime_ns))  # the same but for its inode
    keys.append(cache_key(path))
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    keys.append(cache_key(path))
    assert len(set(keys)) == 4


def test_a_full_disk_is_no_error(
    model: Path, cache: WeightCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "write_packed", full)
        assert not _start(model, cache)[0]
    assert re.search("could not be kept in .*No space left", caplog.text)
    assert list((tmp_path / "cache").iterdir()) == []
    assert not _start(model, cache)[0]
    assert _start(model, cache)[0]


def test_a_directory_that_cannot_be_made_is_no_error(model: Path, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    cache = WeightCache(tmp_path / "file" / "cache", GB)
    assert not _start(model, cache)[0]
    assert "could not be kept" in caplog.text


def test_the_file_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    def write(key: str) -> None:
        cache.write(key, {}, [torch.zeros(1024, dtype=torch.uint8)])

    def age(key: str, seconds: int) -> None:
        os.utime(tmp_path / f"{key}.packed.safetensors", (seconds, seconds))

    cache = WeightCache(tmp_path, 3 * 1300)
    for seconds, key in enumerate("abc"):
        write(key)
        age(key, seconds)
    assert cache.read("a") is not None  # is the newest now
    write("d")
    assert [cache.read(key) is not None for key in "abcd"] == [True, False, True, True]


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    abandoned, in_work = tmp_path / "a.packed.safetensors.tmp", tmp_path / "b.packed.safetensors.tmp"
    for file in (abandoned, in_work):
        file.touch()
    os.utime(abandoned, (0, 0))
    WeightCache(tmp_path, GB).write("key", {}, [])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "b.packed.safetensors.tmp",
        "key.packed.safetensors",
    ]


def test_files_of_the_old_format_are_removed_and_no_others(model: Path, tmp_path: Path) -> None:
    for name in ("0123.quireweights", "model.safetensors", "notes.tmp"):
        (tmp_path / name).write_bytes(b"content")
        os.utime(tmp_path / name, (0, 0))
    WeightCache(tmp_path, 1000).write("key", {}, [torch.zeros(960, dtype=torch.uint8)])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "key.packed.safetensors",
        "model.safetensors",
        "notes.tmp",
    ]


def test_the_file_is_a_safetensors_file_and_its_buffers_are_aligned(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, GB)
    buffers = [torch.full((size,), size, dtype=torch.uint8) for size in (64, 192, 128)]
    cache.write("key", {"w": ["int4", 32]}, buffers)
    assert all(
        torch.equal(one, other)
        for one, other in zip(load_file(tmp_path / "key.packed.safetensors").values(), buffers, strict=True)
    )
    found = cache.read("key")
    assert found is not None
    assert found[0] == {"w": ["int4", 32]}
    assert _equal(found[1], buffers)
    assert all(buffer.data_ptr() % 64 == 0 for buffer in found[1])


def test_what_is_more_than_the_limit_is_not_written(model: Path, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache", 1000)
    _start(model, cache)
    assert not (tmp_path / "cache").exists()


def test_several_engines_may_start_at_once(model: Path, cache: WeightCache, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as engines:
        results = [found for _, found in engines.map(lambda _: _start(model, cache), range(8))]
    assert all(_equal(result, results[0]) for result in results)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_buffer_of_another_size_is_refused() -> None:
    memory = FilledMemory([torch.zeros(64, dtype=torch.uint8) for _ in range(2)])
    assert len(memory.allocate(10)) == 10
    with pytest.raises(ValueError, match="a cached buffer has 64 bytes where 65 are needed"):
        memory.allocate(65)
    assert not WeightMemory().is_filled


def _stored(kind: str, path: Path) -> Path:
    """Write a model whose matrices are stored as `kind`; return where."""
    if kind.startswith("gptq"):
        shuffled = "each" if "differ" in kind else True
        draw = functools.partial(random_steps, bits=4, group_size=32, symmetric=False, shuffled=shuffled)
        quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
        make_checkpoint("qwen3", path, hidden_size=128, intermediate_size=256)
        write_quantized(path, quantization, draw, functools.partial(gptq, bits=4, version=1))
        return path
    if kind == "int-quantized":
        draw = functools.partial(random_steps, bits=8, group_size=-1, symmetric=True)
        groups = {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
        quantization = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
        make_checkpoint("qwen3", path, hidden_size=128, intermediate_size=256)
        write_quantized(path, quantization, draw, int_quantized)
        return path
    make_checkpoint("qwen3", path, hidden_size=128, intermediate_size=256)
    return write_gguf(path, "qwen3", kind)[0]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "gptq, desc_act", "gptq, desc_act, orders that differ", "int-quantized"]
)
def test_a_decoder_of_cached_weights_computes_the_same(kind: str, tmp_path: Path) -> None:
    file = _stored(kind, tmp_path / "model")
    cache = WeightCache(tmp_path / "cache", GB)
    config = read_model_config(file)
    logits = []
    for options in ({}, {"cache": cache}, {"cache": cache}):
        decoder = load_decoder(
            file, config, options=WeightOptions(quantization="int8", kernels="native", **options)
        )
        (generated,) = generate(decoder, random_prompts([20], vocab_size=config.vocab_size), num_new=3)
        logits.append(generated.logits)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_the_choice_left_to_quire_is_where_the_cache_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(setting: str, *, num_parameters: int = 10**9) -> WeightCache | None:
        return choose_cache(setting, max_bytes=GB, num_parameters=num_parameters)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose("") is None
    assert choose("auto", num_parameters=10**9 - 1) is None
    chosen = choose("auto")
    assert chosen is not None
    chosen.write("key", {}, [])
    assert (tmp_path / "quire" / "weights" / "key.packed.safetensors").is_file()
    assert choose(str(tmp_path), num_parameters=1) is not None


@pytest.mark.parametrize(
    ("kind", "quantization", "is_worth_it"),
    [
        ("BF16", "none", False),
        ("BF16", "int8", True),
        ("Q4_K", "none", False),
        ("IQ2_XS", "none", True),
    ],
)
@pytest.mark.parametrize("is_for_all", [True, False])
def test_weights_that_are_packed_as_they_are_read_need_no_cache(
    kind: str, quantization: str, is_worth_it: bool, is_for_all: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    path = make_checkpoint("qwen3", tmp_path / "model", **sizes, num_hidden_layers=1)
    file, _ = write_gguf(path, "qwen3", "BF16", **({} if kind == "BF16" else {"random_kind": kind}))
    cache = WeightCache(tmp_path / "cache", GB, is_for_all=is_for_all)
    options = WeightOptions(quantization=quantization, kernels="native", cache=cache)
    load_decoder(file, read_model_config(file), options=options)
    assert bool(list((tmp_path / "cache").glob("*"))) == (is_worth_it or is_for_all)

"""Reading a model's config from its directory or its GGUF file. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.models.checkpoints.gguf.config import read_gguf_config
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.stored_kinds import with_stored_quantization
from quire.models.checkpoints.json_files import entry, read_json
from quire.models.checkpoints.model_files import INDEX_FILE, SINGLE_FILE, find_file
from quire.models.checkpoints.quantized.description import describe_quantization
from quire.models.checkpoints.quantized.stored_kinds import with_stored_tensors
from quire.models.config import ModelConfig
from quire.models.families import FAMILIES, model_config

_COMPARED_BYTES = 1 << 20  # at a time, so that they stay in a cache


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face model directory, or the metadata of a GGUF file.

    Raises:
        UnknownArchitectureError: the architecture is not a known one; the message lists those.
        ModelError: the file is missing, cannot be read, or lacks or contradicts something needed.
    """
    gguf = find_gguf(path)
    if gguf is None:
        values = read_json(path / "config.json")
        if values is None:
            raise ModelError(f"{path} holds no config.json; is it a Hugging Face model directory?")
        config = model_config(values)
        quantization = values.get("quantization_config") or {}
        stored = describe_quantization(quantization)
        config = dataclasses.replace(
            config,
            stored_quantization=stored.kind,
            stored_group_size=stored.group_size,
            tie_word_embeddings=config.tie_word_embeddings and not _has_own_output(path, config),
        )
        headers = _headers(path) if quantization else {}
        return with_stored_tensors(config, quantization, headers) if headers else config
    values, kinds = read_gguf_config(gguf)
    try:
        config = model_config(values)
    except ModelError as error:
        raise ModelError(f"the metadata of {gguf}, taken as a config.json: {error}") from error
    return with_stored_quantization(config, kinds)


def _has_own_output(path: Path, config: ModelConfig) -> bool:
    """Return whether the files of a model hold an output layer that differs from the embedding.

    Fine-tuning may have separated them without a word in config.json; then the output layer that is stored
    counts, as for `transformers`. Where the files are wrong, loading them tells.
    """
    names = FAMILIES[config.family].weight_names
    output = _stored(path, names["output"])
    embedding = None if output is None else _stored(path, names["embedding"])
    if output is None or embedding is None:
        return False
    if output[:2] != embedding[:2]:
        return True
    starts = range(0, len(output[2]), _COMPARED_BYTES)
    return any(
        output[2][start : start + _COMPARED_BYTES].tobytes()
        != embedding[2][start : start + _COMPARED_BYTES].tobytes()
        for start in starts
    )


def _stored(path: Path, name: str) -> tuple[str, list[int], npt.NDArray[np.uint8]] | None:
    """Return type, shape and bytes of a tensor in a model's safetensors files, if it is there."""
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="numpy") as opened:  # checks the header
                if name not in opened.keys():  # noqa: SIM118, it is no dictionary
                    continue
            with file.open("rb") as raw:
                (header_bytes,) = struct.unpack("<Q", raw.read(8))
                described = json.loads(raw.read(header_bytes))[name]
        except (SafetensorError, OSError):
            continue
        start, stop = described["data_offsets"]
        octets = np.memmap(file, np.uint8, "r", offset=8 + header_bytes + start, shape=(stop - start,))
        return described["dtype"], described["shape"], octets
    return None


def _headers(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return type and shape of every tensor in a model's safetensors files, as far as these can be read."""
    found: dict[str, tuple[str, list[int]]] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="numpy") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                found |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
        except (SafetensorError, OSError):
            continue
    return found


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model, as far as they are there."""
    single = find_file(path, SINGLE_FILE)
    if single is not None:
        return [single]
    index = path / INDEX_FILE
    named = (entry(read_json(index) or {}, "weight_map", dict, index) or {}).values()
    names = sorted({name for name in named if isinstance(name, str)})
    return [file for file in (find_file(path, name) for name in names) if file is not None]

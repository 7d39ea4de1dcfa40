"""Reading a model's config from its directory or its GGUF file. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.models.checkpoints.gguf.config import read_gguf_config
from quire.models.checkpoints.gguf.file import STORED_AS
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.json_files import entry, read_json
from quire.models.checkpoints.model_files import INDEX_FILE, SINGLE_FILE, find_file
from quire.models.checkpoints.names import StoredLayout, published_parts, stored_layout
from quire.models.checkpoints.quantized.description import describe_quantization
from quire.models.checkpoints.quantized.memory_formats import (
    FLOATS,
    Headers,
    TensorHeader,
    stored_names,
    tensor_names,
    with_kinds,
    with_stored_tensors,
)
from quire.models.checkpoints.sentence_modules import with_sentence_modules
from quire.models.config import ModelConfig
from quire.models.families import FAMILIES
from quire.models.reading import model_config
from quire.models.wrappers import decoder_entries

_COMPARED_BYTES = 1 << 20  # bytes compared at a time, to stay in a CPU cache


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face model directory, or the metadata of a GGUF file.

    Raises:
        UnknownArchitectureError: the architecture is not a known one; the message has the nearest names.
        ModelError: the file is missing, unreadable, incomplete or inconsistent.
    """
    gguf = find_gguf(path)
    if gguf is None:
        values = read_json(path / "config.json")
        if values is None:
            raise ModelError(f"{path} holds no config.json; is it a Hugging Face model directory?")
        config = model_config(values)
        entries = decoder_entries(values)
        quantization = entries.get("quantization_config") or {}
        stored = describe_quantization(quantization)
        config = dataclasses.replace(
            with_sentence_modules(_as_tied_in_files(path, config), path),
            stored_quantization=stored.kind,
            stored_group_size=stored.group_size,
        )
        layout = stored_layout(config.architecture, entries)
        headers = _headers(path, stored_names(config), layout) if quantization else {}
        return with_stored_tensors(config, quantization, headers) if headers else config
    values, type_of = read_gguf_config(gguf)
    try:
        config = model_config(values)
    except ModelError as error:
        raise ModelError(f"the metadata of {gguf}, taken as a config.json: {error}") from error
    return with_kinds(config, lambda source: STORED_AS.get(type_of(source.name), FLOATS))


def _as_tied_in_files(path: Path, config: ModelConfig) -> ModelConfig:
    """Return the config of a model with a tied output layer, corrected by what its files contain.

    They may hold the matrix by either name. If they hold two that differ, fine-tuning has separated them
    without a word in config.json, and the output layer that is stored counts. So it is in `transformers`.
    Where the files are wrong, loading them tells.
    """
    if not config.tie_word_embeddings:
        return config
    names = FAMILIES[config.family].weight_names
    output, embedding = (_headers(path, tensor_names(names[field])) for field in ("output", "embedding"))
    if output and not embedding:
        return dataclasses.replace(config, embedding_field="output")
    return dataclasses.replace(
        config, tie_word_embeddings=not (output and embedding) or _equal(output, embedding)
    )


def _equal(some: Headers, others: Headers) -> bool:
    """Return whether two matrices are equal, or unreadable; a quantized one differs."""
    if len(some) > 1 or len(others) > 1:
        return False
    (one,), (other,) = some.values(), others.values()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        octets, others_octets = _octets(one), _octets(other)
    except (OSError, ValueError, TypeError):  # safetensors accepts some malformed headers
        return True
    starts = range(0, len(octets), _COMPARED_BYTES)
    return all(
        octets[start : start + _COMPARED_BYTES].tobytes()
        == others_octets[start : start + _COMPARED_BYTES].tobytes()
        for start in starts
    )


def _headers(path: Path, names: Set[str], layout: StoredLayout | None = None) -> Headers:
    """Return the headers of the readable tensors with these names in a model's safetensors files."""
    found: dict[str, TensorHeader] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="numpy") as opened:
                for stored in sorted(opened.keys()):
                    header = opened.get_slice(stored)
                    for name, _ in published_parts(stored, header.get_shape(), layout):
                        if name in names:
                            found[name] = TensorHeader(file, stored, header.get_dtype(), header.get_shape())
        except (SafetensorError, OSError, ModelError):
            continue
    return found


def _octets(header: TensorHeader) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor in a file whose header `safe_open` has checked."""
    with header.file.open("rb") as raw:
        (header_bytes,) = struct.unpack("<Q", raw.read(8))
        start, stop = json.loads(raw.read(header_bytes))[header.stored_name]["data_offsets"]
    return np.memmap(header.file, np.uint8, "r", offset=8 + header_bytes + start, shape=(stop - start,))


def _weight_files(path: Path) -> list[Path]:
    """Return the existing safetensors files of a model."""
    single = find_file(path, SINGLE_FILE)
    if single is not None:
        return [single]
    index = path / INDEX_FILE
    named = (entry(read_json(index) or {}, "weight_map", dict, index) or {}).values()
    names = sorted({name for name in named if isinstance(name, str)})
    return [file for file in (find_file(path, name) for name in names) if file is not None]

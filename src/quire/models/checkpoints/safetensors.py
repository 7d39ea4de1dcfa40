"""Weights in safetensors files: single or sharded, in floating point or quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.kernels.layers.weights import Weight
from quire.models.checkpoints.json_files import entry, read_json
from quire.models.checkpoints.mapped_files import drop_pages
from quire.models.checkpoints.model_files import INDEX_FILE, SINGLE_FILE, find_file
from quire.models.checkpoints.names import (
    StoredPart,
    is_of_other_part,
    published_parts,
    stored_layout,
)
from quire.models.checkpoints.quantized.formats import formats_of
from quire.models.checkpoints.quantized.matrices import MatrixFormat
from quire.models.checkpoints.sentence_modules import dense_folders
from quire.models.embedding import EncodedRows
from quire.models.wrappers import architecture_of, decoder_entries, is_wrapper

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What decoding can raise over parts whose shapes and types were not foreseen.
_INCONSISTENCIES = (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError)
# In old checkpoints: derived from the config, and masks that make attention causal.
_DERIVED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    *(f".{a}.{b}" for a in ("attn", "attention") for b in ("bias", "masked_bias")),
)
_DRAFTING = "mtp."  # heads for the tokens after the next, as in Qwen3.5


class SafetensorsWeights:
    """See `quire.models.checkpoints.checkpoint.WeightStore`.

    Args:
        path: directory with `config.json` and `model.safetensors`, or shards and their index; and with
            folders of dense layers, see `sentence_modules.py`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        config = path / "config.json"
        values = read_json(config) or {}
        self._is_wrapper = is_wrapper(values)
        layout = stored_layout(architecture_of(values), decoder_entries(values))
        self._formats = formats_of(entry(decoder_entries(values), "quantization_config", dict, config) or {})
        self._places: dict[str, tuple[Any, StoredPart]] = {}
        with contextlib.ExitStack() as files:
            for name in weight_files(path):
                file = files.enter_context(_open(name))
                for stored in sorted(file.keys()):
                    for published, part in published_parts(stored, _shape(file, stored), layout):
                        if published in self._places:
                            raise ModelError(
                                f"{name} holds {stored}, which another file of the model holds too, or the "
                                "same one by another name"
                            )
                        self._places[published] = file, part
            for folder in dense_folders(path):
                for name in weight_files(path / folder):
                    file = files.enter_context(_open(name))
                    for stored in sorted(file.keys()):
                        self._places[f"{folder}.{stored}"] = file, StoredPart(stored)
            self._files = files.pop_all()

    def close(self) -> None:
        """See `WeightStore`. Returned tensors keep their mapping alive."""
        self._places.clear()
        self._files.close()

    def names(self) -> Set[str]:
        """See `WeightStore`."""
        return self._places.keys()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See `WeightStore`."""
        form = self._format_of_weight(name)
        return (name,) if form is None else tuple(f"{_stem(name)}.{part}" for part in form.needed)

    def is_ignored(self, name: str) -> bool:
        """See `WeightStore`: buffers, unused parts of quantized matrices, zero biases that GPTQ tools add,
        heads that draft several tokens at once, and vision and audio of a multimodal model.
        """
        if name.endswith(_DERIVED_SUFFIXES) or name.startswith(_DRAFTING):
            return True
        if self._is_wrapper and is_of_other_part(name):
            return True
        form = self._format(name)
        if form is None:
            return False
        last = name.rpartition(".")[2]
        if last == "bias":
            return not self._tensor(name).any()
        return last in form.optional + form.ignored

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """See `WeightStore`."""
        form = self._format_of_weight(name)
        if form is None:
            return self._float(name, shape)
        stem = _stem(name)
        wanted = (*form.needed, *(part for part in form.optional if f"{stem}.{part}" in self._places))
        try:
            return form.decode({part: self._tensor(f"{stem}.{part}") for part in wanted}, shape)
        except _INCONSISTENCIES as error:
            raise ModelError(
                f"{stem} in {self._path}, a quantized matrix, cannot be read: {error}"
            ) from error

    def encoded_embedding(self, name: str, shape: tuple[int, ...]) -> EncodedRows | None:
        """See `WeightStore`: rows of quantized matrices are not stored separately."""
        return None

    def is_packed_quickly(self, block_kinds: Set[str]) -> bool:
        """See `WeightStore`."""
        return not self._formats

    def release(self, name: str) -> None:
        """See `WeightStore`."""
        for stored in self.stored_names(name):
            drop_pages(self._tensor(stored))

    def _float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} in {self._path} has shape {list(tensor.shape)}; config.json asks for {list(shape)}"
            )
        if tensor.dtype == torch.float8_e4m3fn:
            raise ModelError(
                f"{name} in {self._path} is stored as {tensor.dtype}, and there is no scale for it; "
                f"{_stem(name)}.weight_scale_inv or .weight_scale is needed, and a quantization_config in "
                "config.json that says so"
            )
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"{name} in {self._path} is stored as {tensor.dtype}; only bfloat16, float16 and "
                "float32 weights are supported"
            )
        return tensor

    def _tensor(self, name: str) -> torch.Tensor:
        file, part = self._places[name]
        try:
            return part.of(file.get_tensor(part.name))
        except (SafetensorError, RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ModelError(f"{part.name} in {self._path} cannot be read: {error!s:.500}") from error

    def _format_of_weight(self, name: str) -> MatrixFormat | None:
        """Return the format of the weight `name`; None: floating point, as for all biases."""
        return self._format(name) if name.endswith(".weight") else None

    def _format(self, name: str) -> MatrixFormat | None:
        """Return the format of the matrix that the tensor `name` belongs to; None: floating point."""
        stem = _stem(name)
        return next((form for form in self._formats if f"{stem}.{form.key}" in self._places), None)


def weight_files(path: Path) -> Iterator[Path]:
    """Yield the safetensors files of the model in directory `path`.

    Raises:
        ModelError: there are none, or see `find_file`.
    """
    single = find_file(path, SINGLE_FILE)
    if single is not None:
        yield single
        return
    index = read_json(path / INDEX_FILE)
    if index is None:
        raise ModelError(
            f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}, nor a GGUF file; Quire reads no other "
            "weights"
        )
    names = (entry(index, "weight_map", dict, path / INDEX_FILE) or {}).values()
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"{path / INDEX_FILE}: weight_map has {name!r:.100}; it must name files")
    for name in sorted(set(names)):
        shard = find_file(path, name)
        if shard is None:
            raise ModelError(f"{path / name}, which {INDEX_FILE} names, does not exist")
        yield shard


def _shape(file: Any, stored: str) -> list[int]:
    """Return a tensor's shape; [] if its header is malformed, which reading it tells."""
    try:
        return list(file.get_slice(stored).get_shape())
    except SafetensorError:
        return []


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error!s:.500}") from error

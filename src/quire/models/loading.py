"""Loading a decoder's weights from safetensors files: single or sharded, fused and converted on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.models.config import ModelConfig, read_json
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.weights import WeightSource, WeightSpec, weight_specs

Progress = Callable[[int, int], None]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)  # old checkpoints hold these; they follow from the config


def load_decoder(
    path: Path, config: ModelConfig, dtype: str, *, on_progress: Progress | None = None
) -> Decoder:
    """Load the model in directory `path`.

    Args:
        path: directory with `model.safetensors`, or its shards and `model.safetensors.index.json`.
        config: the model's numbers, from the same directory.
        dtype: bfloat16, float16, float32, or auto for the type in `config`.
        on_progress: called with (bytes loaded, bytes in all) after each tensor, in the loaded type.

    Raises:
        ModelError: names a missing, unexpected or misshapen weight, or a file that cannot be read.
    """
    torch_dtype: torch.dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    specs = list(weight_specs(config))
    total = config.num_parameters * torch_dtype.itemsize
    done = 0
    tensors: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in range(-1, config.num_layers)}
    with _Checkpoint(path) as checkpoint:
        checkpoint.check_names(specs, config)
        for spec in specs:
            is_norm = spec.field.endswith("norm")
            tensor = checkpoint.read(spec, torch.float32 if is_norm else torch_dtype)
            tensors[spec.layer][spec.field] = tensor + config.norm_offset if is_norm else tensor
            done += tensor.numel() * torch_dtype.itemsize
            if on_progress is not None:
                on_progress(done, total)
    return _assemble(config, tensors)


def _assemble(config: ModelConfig, tensors: dict[int, dict[str, torch.Tensor]]) -> Decoder:
    model = tensors.pop(-1)
    for layer in tensors.values():
        for field in ("expert_gate_up", "expert_down"):
            if field in layer:
                layer[field] = layer[field].view(config.num_experts, -1, layer[field].shape[1])
    return Decoder(
        config,
        embedding=model["embedding"],
        layers=[DecoderLayer(**tensors[index]) for index in range(config.num_layers)],
        norm=model["norm"],
        output=model["embedding"] if config.tie_word_embeddings else model["output"],
    )


class _Checkpoint:
    """The safetensors files of a directory, open and mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _Checkpoint:
        try:
            for name in self._file_names():
                file = self._files.enter_context(_open(self._path / name))
                self._file_of.update(dict.fromkeys(file.keys(), file))
        except BaseException:
            self._files.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._files.close()

    def check_names(self, specs: list[WeightSpec], config: ModelConfig) -> None:
        """Raise `ModelError` if a weight is missing, or one is there that the model has no place for."""
        wanted = {source.name for spec in specs for source in spec.sources}
        missing = sorted(wanted - self._file_of.keys())
        if missing:
            raise ModelError(f"{self._path} lacks {_listed(missing)}, which {config.architecture} needs")
        unexpected = sorted(
            name for name in self._file_of.keys() - wanted if not name.endswith(_DERIVED_SUFFIXES)
        )
        if config.tie_word_embeddings:
            unexpected = [name for name in unexpected if name != "lm_head.weight"]
        if unexpected:
            raise ModelError(
                f"{self._path} holds {_listed(unexpected)}, which {config.architecture} as described by "
                "config.json does not have"
            )

    def read(self, spec: WeightSpec, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor made of the spec's sources."""
        rows = sum(source.shape[0] for source in spec.sources)
        result = torch.empty(rows, *spec.sources[0].shape[1:], dtype=dtype)
        start = 0
        for source in spec.sources:
            stop = start + source.shape[0]
            result[start:stop] = self._read_source(source)
            start = stop
        return result

    def _read_source(self, source: WeightSource) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[source.name].get_tensor(source.name)
        if tuple(tensor.shape) != source.shape:
            raise ModelError(
                f"{source.name} in {self._path} has shape {list(tensor.shape)}; config.json asks for "
                f"{list(source.shape)}"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"{source.name} in {self._path} is stored as {tensor.dtype}; only bfloat16, float16 and "
                "float32 weights are supported"
            )
        return tensor

    def _file_names(self) -> list[str]:
        if (self._path / _SINGLE_FILE).is_file():
            return [_SINGLE_FILE]
        index = read_json(self._path / _INDEX_FILE)
        if index is None:
            raise ModelError(
                f"{self._path} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; Quire reads safetensors only"
            )
        return sorted(set(index.get("weight_map", {}).values()))


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"

"""The identity of KV, in named parts: KV from elsewhere is used only if all parts agree."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire import __version__
from quire.engine.devices import device_name
from quire.engine.memory.model_sizes import dtype_of
from quire.errors import KVFileError
from quire.kv.tiers.disk.checksum import checksum
from quire.models.checkpoints.gguf.location import find_gguf, parts_of

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.memory.plan import MemoryPlan
    from quire.models.config import ModelConfig

_PIECE_BYTES = 1 << 24
_ROPES_BY_LENGTH = ("dynamic", "longrope")  # whose frequencies depend on the maximum length


def kv_identity(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> dict[str, str]:
    """Return the parts by name, in words. Reads all weights: that takes seconds for a large model."""
    weights = _digest_of_weights(model_path)
    return {"model": f"{model_config.architecture} {weights}", **_parts(config, model_config, plan)}


def loaded_kv_identity(
    files: str, config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> dict[str, str]:
    """Return `kv_identity` of weights that have been loaded.

    Args:
        files: `model_files_key` from before that.

    Raises:
        KVFileError: the model's files have been replaced meanwhile.
    """
    identity = kv_identity(config, model_path, model_config, plan)
    if model_files_key(model_path) != files:
        raise KVFileError(
            f"the files of {model_path} have been replaced since the engine loaded them, so its KV "
            "cannot be identified; restart the engine"
        )
    return identity


def model_files_key(model_path: Path) -> str:
    """Return a key that changes when a file of the model is replaced or written to; reads none of them."""
    from quire.models.checkpoints.weight_cache import cache_key

    return cache_key(model_path)


def kv_fingerprint(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> bytes:
    """Return a fingerprint of 16 bytes for this machine, with the weights identified by their files."""
    from quire.models.checkpoints.weight_cache import cache_key

    key = cache_key(
        model_path,
        kv=_parts(config, model_config, plan),
        instruction_set=_instruction_set(config),
    )
    return bytes.fromhex(key)


def shared_kv_identity(
    config: EngineConfig, model_path: Path, model_config: ModelConfig, plan: MemoryPlan
) -> bytes:
    """Return what is equal on all machines that compute the same KV, bit for bit; reads all weights.

    Raises:
        KVFileError: the model's files are being replaced.
    """
    parts = loaded_kv_identity(model_files_key(model_path), config, model_path, model_config, plan)
    versions = {"versions": f"{__version__} {version('torch')}", "instruction set": _instruction_set(config)}
    return json.dumps(parts | versions, sort_keys=True).encode()


def _instruction_set(config: EngineConfig) -> str:
    from quire.kernels.dispatch import kernel_set

    kernels = kernel_set(config.kernels)
    instructions = kernels.weight_layout or kernels.name
    return f"{instructions} on {device_name(config)}" if config.device == "cuda" else instructions


def _parts(config: EngineConfig, model: ModelConfig, plan: MemoryPlan) -> dict[str, str]:
    """Return all parts but the weights."""
    groups = {"windows with cache groups": str(list(plan.windows))} if plan.windows else {}
    return groups | {
        "shape": _digest(dataclasses.asdict(_without_length(model))),
        "dtype": dtype_of(config, model),
        "quantization": f"{config.quantization} in groups of {config.quantization_group_size}, times "
        f"{config.int4_activations}",
        "KV dtype": plan.kv_dtype,
        "block size": str(plan.block_size),
        "rope": _rope(model),
        "sparse prefill": _sparse_prefill(config),
    }


def _sparse_prefill(config: EngineConfig) -> str:
    """Return which keys the tokens of a prompt leave out: all layers but the first depend on it."""
    scheduler = config.scheduler
    return str(scheduler.sparse_attention_config) if scheduler.use_sparse_attention else "none"


def _without_length(model: ModelConfig) -> ModelConfig:
    """Return a model's configuration without its maximum length, unless its rope depends on that."""
    by_length = any(rope.kind in _ROPES_BY_LENGTH for rope in model.ropes)
    return dataclasses.replace(model, max_model_len=model.max_model_len * by_length)


def _rope(model: ModelConfig) -> str:
    kinds = sorted({f"{rope.kind} with theta {rope.theta:g}" for rope in model.ropes})
    details = [dataclasses.asdict(rope) for rope in model.ropes]
    of_layers = [part.rope and model.ropes.index(part.rope) for part in model.parts]
    return f"{' and '.join(kinds)} {_digest([details, of_layers, _without_length(model).max_model_len])}"


def _digest(values: object) -> str:
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def _digest_of_weights(path: Path) -> str:
    from quire.models.checkpoints.safetensors import weight_files

    gguf = find_gguf(path)
    digest = blake2b(digest_size=8)
    piece = np.empty(_PIECE_BYTES, dtype=np.uint8)
    for name in sorted(weight_files(path)) if gguf is None else parts_of(gguf):
        with name.open("rb") as file:
            while num_bytes := file.readinto(piece.data):
                digest.update(checksum(piece[:num_bytes]))
    return digest.hexdigest()

"""Reading a model's config from its directory or its GGUF file. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.errors import ModelError
from quire.models.checkpoints.gguf.config import read_gguf_config
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.stored_kinds import with_stored_quantization
from quire.models.checkpoints.json_files import read_json
from quire.models.checkpoints.quantized.description import describe_quantization
from quire.models.config import ModelConfig
from quire.models.families import model_config


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
        stored = describe_quantization(values.get("quantization_config") or {})
        return dataclasses.replace(
            config, stored_quantization=stored.kind, stored_group_size=stored.group_size
        )
    values, kinds = read_gguf_config(gguf)
    try:
        config = model_config(values)
    except ModelError as error:
        raise ModelError(f"the metadata of {gguf}, taken as a config.json: {error}") from error
    return with_stored_quantization(config, kinds)

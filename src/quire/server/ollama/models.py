"""GET /api/tags, /api/ps and /api/version, and POST /api/show: information about the model."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from quire.dialogue.formats import has_place_for_tools
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.json_files import read_json
from quire.server.context import ServerContext, context_of
from quire.server.ollama.answers import (
    LocalModel,
    LocalModelList,
    ModelDetails,
    OllamaVersion,
    RunningModel,
    RunningModelList,
    ShownModel,
    timestamp,
)
from quire.server.ollama.options import OWN_NAMES
from quire.server.wire.answers import LATEST, json_response
from quire.server.wire.strict_model import Ignored, StrictModel

API_VERSION = "0.12.11"
"""The version of Ollama's API; clients refuse versions that are too old for them."""

_NEVER_EXPIRES = 100 * 365 * 86_400  # seconds
_QUANTIZATION_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CAPABILITY = Literal["completion", "tools", "thinking"]


class ShowRequest(StrictModel):
    """Body of POST /api/show."""

    model: str | None = Field(None, description="The served model's name; required.")
    name: str | None = Field(None, description="The older name of model.")
    verbose: Ignored = None

    @model_validator(mode="after")
    def _require_name(self) -> ShowRequest:
        if self.model is None and self.name is None:
            raise PydanticCustomError("missing_model", "it must name a model")
        return self


async def list_local_models(request: Request) -> Response:
    """List the served models under each of their names, in Ollama's form."""
    contexts = context_of(request).contexts
    models = [LocalModel(**fields) for context in contexts for fields in await _models(context)]
    return json_response(LocalModelList(models=models))


async def list_running_models(request: Request) -> Response:
    """List the served models under each of their names, but those whose engines sleep."""
    running = []
    for context in context_of(request).contexts:
        expires_at = timestamp(context.started_at + _NEVER_EXPIRES)
        length = context.llm.info.max_model_len
        for fields in [] if await context.llm.is_sleeping() else await _models(context):
            del fields["modified_at"]
            running.append(RunningModel(**fields, expires_at=expires_at, size_vram=0, context_length=length))
    return json_response(RunningModelList(models=running))


async def show_model(request: Request, body: ShowRequest) -> Response:
    """Describe a served model in Ollama's form."""
    context = context_of(request).of_model(body.model or body.name or "")
    details = await _details(context)
    family = details.family or "unknown"
    return json_response(
        ShownModel(
            parameters=_parameters(context.sampling_defaults.fields),
            template=context.chat_template,
            modified_at=timestamp(context.started_at),
            details=details,
            model_info={
                "general.architecture": family,
                f"{family}.context_length": context.llm.info.max_model_len,
                f"{family}.vocab_size": context.llm.info.vocab_size,
            },
            capabilities=_capabilities(context),
        )
    )


async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama's API."""
    return json_response(OllamaVersion(version=API_VERSION))


async def _models(context: ServerContext) -> list[dict[str, Any]]:
    """Return the fields of the model in lists, once for each of its names."""
    info = context.llm.info
    identity = f"{info.model}|{info.dtype}|{info.vocab_size}"
    size = await asyncio.to_thread(_weight_bytes, context.llm.model_path)
    details = await _details(context)
    fields = {
        "modified_at": timestamp(context.started_at),
        "size": size,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": details,
    }
    names = [name if ":" in name.rpartition("/")[2] else name + LATEST for name in context.model_names]
    return [{"name": name, "model": name, **fields} for name in names]


async def _details(context: ServerContext) -> ModelDetails:
    path, dtype = context.llm.model_path, context.llm.info.dtype
    is_gguf, family = await asyncio.to_thread(_kind_of, path)
    return ModelDetails(
        format="gguf" if is_gguf else "safetensors",
        family=family,
        families=[family] if family else [],
        quantization_level=_QUANTIZATION_LEVELS.get(dtype, dtype),
    )


def _parameters(defaults: Mapping[str, Any]) -> str:
    """Return the sampling defaults in the form of Ollama's model files."""
    names = {own_name: name for name, own_name in OWN_NAMES.items()} | {"max_tokens": "num_predict"}
    return "\n".join(f"{names[own_name]} {value}" for own_name, value in defaults.items())


def _capabilities(context: ServerContext) -> list[_CAPABILITY]:
    capabilities: list[_CAPABILITY] = ["completion"]
    if context.tool_call_format is not None and has_place_for_tools(context.chat_template):
        capabilities.append("tools")
    if context.reasoning_format is not None:
        capabilities.append("thinking")
    return capabilities


@functools.lru_cache(maxsize=8)
def _kind_of(path: Path) -> tuple[bool, str]:
    """Return whether a model is a GGUF file, and its architecture's name in the files ("": none)."""
    gguf = find_gguf(path)
    if gguf is not None:
        return True, str(GGUFFile(gguf).entry("general.architecture", str))
    config = read_json(path / "config.json") or {}
    return False, str(config.get("model_type", ""))


@functools.lru_cache(maxsize=8)
def _weight_bytes(path: Path) -> int:
    """Return the size of a model's weights on disk."""
    gguf = find_gguf(path)
    files = path.glob("*.safetensors") if gguf is None else [gguf]
    return sum(file.stat().st_size for file in files)

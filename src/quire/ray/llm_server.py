"""An engine replica for `ray.serve.llm`: `LLMConfig(server_cls="quire.ray:QuireLLMServer")`.

Ray's ingress makes objects of bodies, and takes objects or text of events back. Between them is a request to
the replica's own application, which has the APIs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from quire.cli.options import configs_of
from quire.cluster.engines.upstream import is_end_to_end
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.front.control import PauseMode
from quire.ray.application import limits_of, refuse_meaningless, reserved
from quire.ray.replica import QuireServer

_OF_RAY = ("kv_events_config",)
"""What Ray adds to `engine_kwargs` itself: a replica publishes KV events anyhow."""

_ACCELERATOR_SHARE = 0.001  # of the resource that marks machines with an accelerator


class QuireLLMServer(QuireServer):
    """A replica of the engine that an `LLMConfig` describes; `engine_kwargs` are options of `quire serve`.

    Args:
        llm_config: the configuration.

    Raises:
        QuireError: an option is unknown or unsupported, or the engine could not be built.
    """

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        self._llm_config = llm_config
        await super().__init__(*_configs(llm_config))

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of the deployment: those of `deployment_config`, and what the engine needs.

        Raises:
            ConfigError: an option is unknown or unsupported.
        """
        engine, server = _configs(llm_config)
        given = copy.deepcopy(llm_config.deployment_config)
        actor = given.pop("ray_actor_options", {})
        needed = _reserved(llm_config, engine)
        actor |= needed.pop("ray_actor_options")
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return {**limits_of(engine, server), **needed, **given, "ray_actor_options": actor}

    async def llm_config(self) -> Any:
        """Return the configuration."""
        return self._llm_config

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a `ChatCompletionRequest`: with text of events, one response, or an `ErrorResponse`."""
        return self._answers("/v1/chat/completions", "ChatCompletionResponse", request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a `CompletionRequest`: with text of events, one response, or an `ErrorResponse`."""
        return self._answers("/v1/completions", "CompletionResponse", request, raw_request_info)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer an `EmbeddingRequest`."""
        return self._answers("/v1/embeddings", "EmbeddingResponse", request, raw_request_info)

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a `ScoreRequest`."""
        return self._answers("/v1/score", "ScoreResponse", request, raw_request_info)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a `TokenizeRequest`."""
        return self._answers("/tokenize", "TokenizeResponse", request, raw_request_info)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Answer a `DetokenizeRequest`."""
        return self._answers("/detokenize", "DetokenizeResponse", request, raw_request_info)

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, unless it is in use."""
        await self._context.llm.reset_prefix_cache()

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Admit no requests until `resume`, see `AsyncLLM.pause_generation`."""
        await self._context.llm.pause_generation(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """End the pause."""
        await self._context.llm.resume_generation()

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return await self._context.llm.is_paused()

    async def sleep(self, mode: PauseMode = "abort", *, level: int = 1) -> None:
        """End the engine until `wakeup`, completely at any level, see `AsyncLLM.sleep`."""
        await self._context.llm.sleep(mode)

    async def wakeup(self) -> None:
        """Start the sleeping engine."""
        await self._context.llm.wake_up()

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep."""
        return await self._context.llm.is_sleeping()

    async def _answers(self, path: str, kind: str, request: Any, info: Any) -> AsyncIterator[Any]:
        """Yield a stream's events as text, or one response of a kind, or an `ErrorResponse`."""
        from ray.llm._internal.serve.core.configs import openai_api_models  # needs vLLM or SGLang

        body = request.model_dump_json(exclude_unset=True).encode()
        headers = {} if info is None else info.headers
        whole = b""
        async with contextlib.aclosing(_answer_of(self._app, path, headers, body)) as messages:
            start = await anext(messages)
            is_stream = dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            async for message in messages:
                piece = message.get("body", b"")
                if not is_stream:
                    whole += piece
                elif piece:
                    yield piece.decode()
        if start["status"] != 200:
            error = msgspec.json.decode(whole, type=_Refusal).error
            yield openai_api_models.ErrorResponse(
                error={"message": error.message, "type": error.type, "code": start["status"]}
            )
        elif not is_stream:
            yield getattr(openai_api_models, kind).model_validate_json(whole)


class _Error(msgspec.Struct):
    message: str
    type: str


class _Refusal(msgspec.Struct):
    error: _Error


async def _answer_of(
    app: ASGIApp, path: str, headers: Mapping[str, str], body: bytes
) -> AsyncGenerator[Message]:
    """Yield an application's messages as it answers a POST request, which ends when this is closed."""
    messages: asyncio.Queue[Message | Exception | None] = asyncio.Queue(1)
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    names = {name.lower(): value for name, value in headers.items() if is_end_to_end(name.encode())}
    names |= {"content-type": "application/json", "content-length": str(len(body))}
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in names.items()],
    }

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()  # a client that leaves cancels the request
        return parts.pop()

    async def answer() -> None:
        try:
            await app(scope, receive, messages.put)
        except Exception as error:
            await messages.put(error)
        else:
            await messages.put(None)

    task = asyncio.create_task(answer())
    try:
        while (message := await messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _configs(llm_config: Any) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of an engine and its server.

    Raises:
        ConfigError: an option is unknown or unsupported.
    """
    loading = llm_config.model_loading_config
    if loading.model_source is not None and not isinstance(loading.model_source, str):
        raise ConfigError("model_source is a mirror in a cloud; it must be a directory or a name on the hub")
    callbacks, batching = llm_config.callback_config, "stream_batching_interval_ms"
    for name, is_set in {
        "lora_config": llm_config.lora_config is not None,
        "callback_config": callbacks != type(callbacks)(),
        f"experimental_configs.{batching}": batching in llm_config.experimental_configs,
    }.items():
        if is_set:
            raise ConfigError(f"LLMConfig.{name} is set, which Quire does not support; leave it out")
    given = {name: value for name, value in llm_config.engine_kwargs.items() if name not in _OF_RAY}
    refuse_meaningless(given)
    own = {"model": loading.model_source or loading.model_id, "served_model_name": [loading.model_id]}
    if loading.tokenizer_source is not None:
        own["tokenizer"] = loading.tokenizer_source
    if llm_config.accelerator_type is not None:
        own["device"] = "cuda"
    engine, server = configs_of(
        {**own, **given}, EngineConfig, ServerConfig, defaults={"standby_engine": True}
    )
    num_threads = engine.num_threads or math.ceil(_cpus(llm_config, engine))
    return dataclasses.replace(engine, num_threads=num_threads), server


def _cpus(llm_config: Any, engine: EngineConfig) -> float:
    """Return the CPUs of all ranks."""
    bundles = _bundles(llm_config, engine)
    if bundles is not None:
        return max(1.0, sum(bundle.get("CPU", 0.0) for bundle in bundles))
    given: float = llm_config.deployment_config.get("ray_actor_options", {}).get("num_cpus", 0)
    return given or max(engine.num_threads, engine.tensor_parallel_size)


def _bundles(llm_config: Any, engine: EngineConfig) -> list[dict[str, float]] | None:
    """Return the bundles of `placement_group_config`, if there is one.

    Raises:
        ConfigError: its strategy may divide the ranks among machines.
    """
    placement = llm_config.placement_group_config
    if not placement:
        return None
    strategy = placement.get("strategy", "STRICT_PACK")
    if strategy != "STRICT_PACK":
        raise ConfigError(
            f"placement_group_config.strategy is {strategy!r}, but the ranks of an engine are processes of "
            "one machine; set it to 'STRICT_PACK'"
        )
    bundles: list[dict[str, float]] = placement.get("bundles") or (
        [placement["bundle_per_worker"]] * engine.tensor_parallel_size
    )
    return bundles


def _reserved(llm_config: Any, engine: EngineConfig) -> dict[str, Any]:
    """Return what Ray reserves for a replica."""
    bundles = _bundles(llm_config, engine)
    if bundles is not None:
        first = bundles[0]
        return {
            "ray_actor_options": {"num_cpus": first.get("CPU", 0), "num_gpus": first.get("GPU", 0)},
            "placement_group_bundles": bundles,
            "placement_group_strategy": "STRICT_PACK",
        }
    options = reserved(engine, _cpus(llm_config, engine))
    if (kind := llm_config.accelerator_type) is not None:
        options["ray_actor_options"]["accelerator_type"] = kind
        for bundle in options.get("placement_group_bundles", ()):
            bundle[f"accelerator_type:{kind}"] = _ACCELERATOR_SHARE
    return options

"""What handlers work with: a served model, and what all models of a server share."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from quire import __version__
from quire.config import ServerConfig
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.formats import FORMATS, call_format_of_template, format_of_template
from quire.dialogue.reasoning.formats import REASONING_FORMATS, ReasoningFormat, reasoning_format_of_template
from quire.errors import ConfigError, InvalidRequestError
from quire.server.live_calls import LiveCalls
from quire.server.metrics.registry import Metrics
from quire.server.sampling_defaults import SamplingDefaults, read_sampling_defaults
from quire.server.storage.background import BackgroundResponses, EventLogs
from quire.server.storage.database import IN_MEMORY
from quire.server.storage.response_store import ResponseStore
from quire.server.tenancy.tenants import Tenant, Tenants
from quire.server.wire.answers import LATEST, ModelCard
from quire.server.wire.errors import ApiError
from quire.server.wire.leniency import IgnoredNames, Leniency

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM
    from quire.server.metrics.tracing import Tracing


ENGINE_TIMEOUT = 2.0
"""Seconds to wait for the engine's explanations, so that no query hangs if the engine does."""

STATS_TIMEOUT = 0.03
"""Seconds to wait for the engine's statistics before using the last ones."""


class SharedState:
    """What the models of one server share.

    Args:
        config: the server's configuration.
        tenants: the tenants that `config` names; None: they are read here.
        tracing: traces calls; None: they are not traced.

    Attributes:
        contexts: those of the served models, in order.
        call_ids: those of all models' live calls, as in `LiveCalls`.
    """

    def __init__(
        self, config: ServerConfig, tenants: Tenants | None = None, tracing: Tracing | None = None
    ) -> None:
        self.contexts: list[ServerContext] = []
        self.call_ids: set[str] = set()
        self.version = __version__
        self.started_at = int(time.time())
        self.ignored_names = IgnoredNames()
        self.tenants = tenants or Tenants(config.api_key, config.api_keys_file)
        self.tracing = tracing
        self.background = BackgroundResponses()
        self.event_logs = EventLogs()
        self.responses = _response_store(config)

    async def close(self) -> None:
        """Store responses still being generated, and close the stores."""
        await self.background.close()
        if self.responses is not None:
            await self.responses.close()
        if self.tracing is not None:
            await self.tracing.close()


class ServerContext:
    """One served model, and what it shares with the others of its server.

    Args:
        llm: the front door of the model's engine, ready.
        config: the server's configuration, in which names, defaults and formats are those of the model.
        shared: what the server's models share; the context is added to it.
        sampling_defaults: the defaults that `config` names; None: they are read here.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        shared: SharedState,
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        self.llm = llm
        self.config = config
        self.sampling_defaults = sampling_defaults or read_sampling_defaults(config, llm.model_path)
        self.model_names = tuple(dict.fromkeys(config.served_model_name)) or (llm.info.model,)
        self.calls = LiveCalls(shared.call_ids)
        _require_formats_that_go_together(config, self.chat_template)
        self.version, self.started_at = shared.version, shared.started_at
        self.ignored_names, self.tenants, self.tracing = shared.ignored_names, shared.tenants, shared.tracing
        self.background, self.event_logs = shared.background, shared.event_logs
        self.responses = shared.responses
        self.metrics = Metrics(self.model_name, llm.info.block_size, self.tenants)
        self._shared = shared
        shared.contexts.append(self)
        identity = f"{self.version}|{llm.info.model}|{llm.info.dtype}|{llm.info.vocab_size}"
        self.system_fingerprint = "fp_" + hashlib.blake2s(identity.encode(), digest_size=5).hexdigest()

    @property
    def contexts(self) -> Sequence[ServerContext]:
        """The contexts of all models of the server."""
        return self._shared.contexts

    async def close(self) -> None:
        """Store responses still being generated, and close the stores, for all models."""
        await self._shared.close()

    @functools.cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """The format of the served model's tool calls; None if unknown."""
        return _tool_call_format(self.config, self.chat_template)

    @functools.cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The served model's reasoning format; None: no reasoning, or it is part of the content."""
        return _reasoning_format(self.config, self.chat_template)

    @functools.cached_property
    def prompt_digest(self) -> str | None:
        """Digest of all that makes prompts; None: not even routers with the same files make the same ones."""
        name = reasoning_format_of_template(self.chat_template)
        if self.tool_call_format != call_format_of_template(self.chat_template):
            return None
        if self.reasoning_format != (None if name is None else REASONING_FORMATS[name]):
            return None
        return self.llm.tokenizer.digest

    @property
    def chat_template(self) -> str:
        """The model's chat template, as jinja2 text; empty if there is none."""
        return self.llm.tokenizer.chat_template_source or ""

    @property
    def model_name(self) -> str:
        """The served model's first name."""
        return self.model_names[0]

    @property
    def model_cards(self) -> list[ModelCard]:
        """The served model under each of its names."""
        return list(map(self.model_card, self.model_names))

    def model_card(self, name: str) -> ModelCard:
        """Return the served model's description under one of its names."""
        info = self.llm.info
        return ModelCard(
            id=name,
            created=self.started_at,
            owned_by="quire",
            max_model_len=info.max_model_len,
            task="generate" if info.pooling is None else "classify" if info.labels else "embed",
        )

    def of_model(self, name: str | None) -> ServerContext:
        """Return the context of a model of the server.

        Args:
            name: one of its names, with or without the tag latest; None: there is only one model.

        Raises:
            ApiError: 404: no model has this name; 400: there are several, and none is named.
        """
        if name is None and len(self.contexts) == 1:
            return self
        spellings = set() if name is None else {name, f"{name}{LATEST}", name.removesuffix(LATEST)}
        for context in self.contexts:
            if spellings.intersection(context.model_names):
                return context
        known = ", ".join(repr(one) for context in self.contexts for one in context.model_names)
        if name is None:
            raise ApiError(400, f"model is missing; this server has {known}", param="model")
        raise ApiError(
            404,
            f"the model {name!r:.80} is not served here; this server has {known}",
            param="model",
            code="model_not_found",
        )

    def named(self, reason: str) -> str:
        """Return why the model's engine does not do something, with its name if there are others."""
        return reason if len(self.contexts) == 1 else f"{self.model_name}: {reason}"

    def require_kind(self, *, is_pooled: bool) -> None:
        """Raise `InvalidRequestError` unless the model pools prompts, or unless it generates."""
        if is_pooled and self.llm.info.pooling is None:
            raise InvalidRequestError(
                f"the model {self.model_name} generates and makes no embeddings or scores; use "
                "/v1/chat/completions or /v1/completions, or serve a model that is made for these",
                param="model",
            )
        if not is_pooled and self.llm.info.pooling is not None:
            raise InvalidRequestError(
                f"the model {self.model_name} makes embeddings or scores and cannot generate; use "
                "/v1/embeddings or /v1/classify, or serve a model that generates",
                param="model",
            )

    def require_room(self, num_sequences: int) -> None:
        """Raise `InvalidRequestError` for a call with more sequences than an empty queue accepts."""
        limit = self.llm.config.scheduler.max_num_queued_reqs
        if num_sequences > limit:
            raise InvalidRequestError(
                f"the call asks for {num_sequences} sequences, its prompts times n or best_of; the limit is "
                f"{limit} (the server's max_num_queued_reqs); send several smaller calls",
                param="n",
            )


def _response_store(config: ServerConfig) -> ResponseStore | None:
    if config.response_store == "off":
        return None
    path = IN_MEMORY if config.response_store == "memory" else config.response_store
    return ResponseStore(path, config.max_stored_response_bytes)


def _tool_call_format(config: ServerConfig, template: str) -> ToolCallFormat | None:
    name: str | None = config.tool_call_format
    if name == "auto":
        name = "harmony" if config.reasoning_format == "harmony" else format_of_template(template)
    return None if name is None else FORMATS[name]


def _reasoning_format(config: ServerConfig, template: str) -> ReasoningFormat | None:
    name: str | None = config.reasoning_format
    if name == "auto":
        name = "harmony" if config.tool_call_format == "harmony" else reasoning_format_of_template(template)
    return None if name is None or name == "none" else REASONING_FORMATS[name]


def _require_formats_that_go_together(config: ServerConfig, template: str) -> None:
    """Raise `ConfigError` if only one of the formats of calls and reasoning is harmony."""
    call_format, reasoning_format = _tool_call_format(config, template), _reasoning_format(config, template)
    if call_format is None or reasoning_format is None:
        return
    if call_format.in_messages != reasoning_format.in_messages:
        harmonic = "calls" if call_format.in_messages else "reasoning"
        raise ConfigError(
            f"only the format of the model's {harmonic} is harmony, in which both are messages; set both of "
            "--tool-call-format and --reasoning-format, or neither"
        )


def context_of(request: Request) -> ServerContext:
    """Return the context of the first model of the application that got `request`."""
    context: ServerContext = request.app.state.context
    return context


def contexts_of(request: Request) -> Sequence[ServerContext]:
    """Return the contexts of the models that `request` is about: the one in its query, or all of them.

    Raises:
        ApiError: 404: there is no such model.
    """
    context, name = context_of(request), request.query_params.get("model")
    return context.contexts if name is None else [context.of_model(name)]


def request_id_of(request: Request) -> str:
    """Return the request's X-Request-Id, the client's or a generated one."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def leniency_of(request: Request) -> Leniency:
    """Return the leniency for the body of `request`, which collects ignored fields."""
    leniency: Leniency = request.scope["state"]["leniency"]
    return leniency


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that sent `request`."""
    tenant: Tenant = request.scope["state"].get("tenant") or context_of(request).tenants.default
    return tenant

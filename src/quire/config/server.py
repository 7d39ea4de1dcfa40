"""The HTTP server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen, MinLen

from quire.config.batches import BatchConfig
from quire.config.connections import ConnectionConfig
from quire.config.edge import EdgeConfig
from quire.config.fields import check_limits, config, knob, refuse_blank_key
from quire.errors import ConfigError
from quire.limits import NonNegativeFloat, PositiveInt

ModelName = Annotated[str, MinLen(1)]

ToolCallFormatName = Literal[
    "auto",
    "apertus",
    "cohere",
    "deepseek_v3",
    "deepseek_v31",
    "gemma",
    "gemma4",
    "glm",
    "glm47",
    "granite",
    "harmony",
    "hermes",
    "hunyuan",
    "hunyuan_a13b",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "nemotron",
    "olmo3",
    "phi",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]

ReasoningFormatName = Literal[
    "auto",
    "none",
    "apertus",
    "cohere",
    "ernie",
    "exaone",
    "gemma4",
    "granite",
    "harmony",
    "hunyuan",
    "kimi",
    "mistral",
    "seed",
    "think",
]

OF_MODEL = (
    "served_model_name",
    "generation_config",
    "override_generation_config",
    "tool_call_format",
    "reasoning_format",
    "thinking_budget_message",
)
"""Fields of `ServerConfig` in which the models of one server may differ."""

_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@config
class ServerConfig:
    """The HTTP server.

    Raises:
        ConfigError: there is no field of that name, a value is outside its limits, or values contradict each
            other.
    """

    host: str = knob(default="127.0.0.1", help="Address to listen on.")
    port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=8000, help="TCP port to listen on. 0: any free port."
    )
    served_model_name: Annotated[tuple[ModelName, ...], MaxLen(64)] = knob(
        default=(),
        unit="names",
        help="Names of the model in requests: any of them is taken and comes back in the response. Empty: "
        "the model's own name.",
    )
    generation_config: str = knob(
        default="auto",
        help="Source of the default sampling parameters: auto, the generation_config.json of the model; "
        "vllm, no file; or a directory with such a file.",
    )
    override_generation_config: Mapping[str, float] | None = knob(
        default=None,
        unit="names of sampling parameters",
        help="Defaults that win over those of the file: of temperature, top_p, top_k, min_p, "
        "repetition_penalty and max_new_tokens.",
    )
    tool_call_format: ToolCallFormatName = knob(
        default="auto",
        help="Format in which the model calls tools. auto: known from its chat template.",
    )
    reasoning_format: ReasoningFormatName = knob(
        default="auto",
        help="Format of the model's reasoning. auto: detected from its chat template; none: reasoning is "
        "content.",
    )
    thinking_budget_message: str = knob(
        default="",
        help="Text that is put before the end of reasoning whose thinking_token_budget is used up, such as: "
        "Time is up, so I answer now.",
    )
    api_key: str = knob(
        default="",
        help="Key that clients must send, as bearer token or x-api-key; several, separated by spaces, are "
        "all valid. Other users of the machine see a flag in ps, but not QUIRE_API_KEY in the environment. "
        "Empty: none.",
        environment_variable="QUIRE_API_KEY",
    )
    api_keys_file: str = knob(
        default="",
        help="TOML file of tenants: their keys, weights and limits; see docs/tenants.md. It is read again "
        "when it changes, and on SIGHUP. Empty: none.",
        environment_variable="QUIRE_API_KEYS_FILE",
    )
    max_body_bytes: PositiveInt = knob(
        default=4_194_304,
        unit="bytes",
        help="Maximum size of a request body; a larger one is refused with status 413.",
    )
    max_logprobs_per_request: PositiveInt = knob(
        default=524_288,
        help="Maximum number of log-probabilities that a request may ask for: completions times tokens times "
        "candidates for each token; or of scores of tokens: labels for each. Each takes about 200 bytes "
        "until the answer is complete.",
    )
    strict: bool = knob(
        default=False,
        help="Refuse parameters that are unknown or have no effect. Otherwise they are accepted, and the "
        "header X-Ignored-Parameters of the answer names them.",
    )
    trust_request_start: bool = knob(
        default=False,
        help="Take the time in a request's X-Request-Start header, which a router sets, for its arrival, so "
        "that it keeps its place in the queue. Only where clients cannot reach the server without the "
        "router: one that sets the header itself would go before others.",
    )
    engine_control: bool = knob(
        default=False,
        help="Serve POST /pause, /resume, /sleep and /wake_up, which stop the engine for everybody; with a "
        "key file, to admins only.",
    )
    response_store: str = knob(
        default="memory",
        help="Where to store the responses of /v1/responses for later turns: memory, until the server "
        "ends; the path of an SQLite database; or off.",
    )
    max_stored_response_bytes: PositiveInt = knob(
        default=67_108_864,
        unit="bytes",
        help="Maximum size of a tenant's stored responses; the oldest make room for new ones.",
    )
    otlp_traces_endpoint: str = knob(
        default="",
        help="URL of an OpenTelemetry collector that takes OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; each call that generates is sent there as a span. It needs the "
        "extra otel. Empty: none.",
    )
    drain_timeout: NonNegativeFloat = knob(
        default=30.0,
        unit="seconds",
        help="Time that running requests have to finish after SIGTERM or Ctrl-C before they are aborted.",
    )
    root_path: str = knob(
        default="",
        help="Path that all paths begin with for clients, as in /llm, if a proxy serves others beside it. "
        "The proxy may take it off. Empty: none.",
    )
    page: bool = knob(
        default=True,
        help="Serve a page for browsers at /: a chat, and what the engine does. It holds no secrets and is "
        "sent without a key; what it does needs one like any other client.",
    )
    edge: EdgeConfig = dataclasses.field(default_factory=EdgeConfig)
    connections: ConnectionConfig = dataclasses.field(default_factory=ConnectionConfig)
    batches: BatchConfig = dataclasses.field(default_factory=BatchConfig)

    def __post_init__(self) -> None:
        check_limits(self)
        refuse_blank_key(self, "api_key")
        if self.otlp_traces_endpoint and not _URL.fullmatch(self.otlp_traces_endpoint):
            raise ConfigError(
                f"ServerConfig.otlp_traces_endpoint is {self.otlp_traces_endpoint!r:.200}; it must be a URL "
                "that begins with http:// or https://, as in http://localhost:4318/v1/traces"
            )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"ServerConfig.root_path is {self.root_path!r:.200}; it must be like /llm: begin with a "
                "slash, not end with one, and need no escapes in a URL"
            )

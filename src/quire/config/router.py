"""The router in front of several engines."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Le

from quire.config.connections import ConnectionConfig
from quire.config.edge import EdgeConfig
from quire.config.fields import check_limits, config, knob, refuse_blank_key
from quire.errors import ConfigError
from quire.limits import NonNegativeFloat, NonNegativeInt, PositiveInt, Timeout


@config
class RouterConfig:
    """`quire route`: one OpenAI server made of several engines."""

    host: str = knob(default="127.0.0.1", help="Address to listen on.")
    port: Annotated[int, Ge(0), Le(65535)] = knob(
        default=8080, help="TCP port to listen on. 0: any free port."
    )
    prefill: tuple[str, ...] = knob(
        default=(), unit="URLs", help="Engines that compute prompts and pass their KV on."
    )
    decode: tuple[str, ...] = knob(
        default=(), unit="URLs", help="Engines that continue prompts that others have computed."
    )
    engine: tuple[str, ...] = knob(default=(), unit="URLs", help="Engines that do both.")
    api_key: str = knob(
        default="",
        help="Key that clients must send, as bearer token or x-api-key; several, separated by spaces, are "
        "all valid. Other users of the machine see a flag in ps, but not QUIRE_API_KEY in the environment. "
        "Empty: none.",
        environment_variable="QUIRE_API_KEY",
    )
    engine_api_key: str = knob(
        default="",
        help="Bearer token that engines are sent. Empty: the client's, unless that is the router's api_key.",
        environment_variable="QUIRE_ENGINE_API_KEY",
    )
    pass_client_keys: bool = knob(
        default=False,
        help="Send engines each client's own key, so that they know its tenant, and engine_api_key only with "
        "the router's own questions. Engines check the keys; api_key must be empty.",
    )
    max_body_bytes: PositiveInt = knob(
        default=4_194_304,
        unit="bytes",
        help="Maximum size of a request body; a larger one is refused with status 413.",
    )
    max_in_flight: PositiveInt = knob(
        default=1024,
        unit="requests",
        help="Maximum number of requests served at the same time; more are refused with status 429.",
    )
    min_prefill_bytes: NonNegativeInt = knob(
        default=2048,
        unit="bytes",
        help="A prompt of which fewer bytes are new to its decode engine is computed there, without a "
        "prefill engine. In English, a token has about four bytes.",
    )
    max_remembered_chunks: PositiveInt = knob(
        default=65_536,
        unit="chunks of 512 bytes",
        help="How much of past prompts to remember, so that prompts with the same prefix go to the same "
        "engine.",
    )
    tokenizer: tuple[str, ...] = knob(
        default=(),
        unit="models",
        help="Model whose tokenizer engines have, one for each model that they serve: mini, a directory, a "
        "GGUF file, or a name on the Hugging Face hub. With it, the KV events of these engines tell which "
        "prompts they have cached. Empty: guessed from the text that they were sent.",
    )
    tokenize_timeout: Timeout = knob(
        default=0.2,
        unit="seconds",
        help="Time to look up how much of a prompt engines have cached; after that, it is guessed from "
        "the text.",
    )
    max_cached_blocks: PositiveInt = knob(
        default=1_048_576,
        unit="KV blocks",
        help="Maximum number of cached blocks to track, over all engines. 140 bytes each.",
    )
    kv_transfer: Literal["overlapped", "sequential"] = knob(
        default="overlapped",
        help="overlapped: a decode engine gets its request at once, and reads KV while the prefill engine "
        "computes it; sequential: when the prompt has been computed.",
    )
    connect_timeout: Timeout = knob(
        default=5.0, unit="seconds", help="Time for a connection to an engine, and for a health check."
    )
    prefill_timeout: Timeout = knob(
        default=60.0,
        unit="seconds",
        help="Time that a prefill engine has for a prompt before the request goes elsewhere.",
    )
    first_byte_timeout: Timeout = knob(
        default=600.0,
        unit="seconds",
        help="Time that an engine has for the first token of a stream, or for all of another answer.",
    )
    idle_timeout: Timeout = knob(
        default=120.0,
        unit="seconds",
        help="Silence within an answer after which the engine times out, after at most twice that.",
    )
    recovery_timeout: NonNegativeFloat = knob(
        default=60.0,
        unit="seconds",
        help="Time that a POST request waits for an engine to be up: when its own has failed, or when all "
        "have that were up before. A stream that has begun continues there.",
    )
    health_interval: Timeout = knob(
        default=1.0,
        unit="seconds",
        help="Time between two health checks of an engine; it doubles with each that fails, up to 16 times.",
    )
    drain_timeout: NonNegativeFloat = knob(
        default=30.0,
        unit="seconds",
        help="Time that running requests have to finish after SIGTERM or Ctrl-C before they are aborted.",
    )
    edge: EdgeConfig = dataclasses.field(default_factory=EdgeConfig)
    connections: ConnectionConfig = dataclasses.field(default_factory=ConnectionConfig)

    def __post_init__(self) -> None:
        check_limits(self)
        refuse_blank_key(self, "api_key")
        if self.pass_client_keys and self.api_key:
            raise ConfigError(
                "RouterConfig.pass_client_keys is on and api_key is set: clients would send the router's "
                "key, which engines do not know; leave api_key empty"
            )
        urls: set[str] = set()
        for name in ("prefill", "decode", "engine"):
            for given in getattr(self, name):
                url = engine_url(given, f"RouterConfig.{name}")
                if url in urls:
                    raise ConfigError(f"RouterConfig.{name} names {url} a second time; give each engine once")
                urls.add(url)


def engine_url(given: str, name: str) -> str:
    """Return the base URL of an engine without a slash at its end.

    Args:
        given: the URL.
        name: what it is, for the error.

    Raises:
        ConfigError: it is no URL of an HTTP server.
    """
    try:
        parts = urlsplit(given)
        is_base_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_base_url = False
    if not is_base_url or parts.query or parts.fragment or parts.username or not given.isprintable():
        raise ConfigError(f"{name} is {given!r:.300}; it must be a URL such as http://127.0.0.1:8000")
    return given.rstrip("/")

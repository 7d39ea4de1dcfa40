"""A running OpenAI-compatible server as a target: streaming completions over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp.http import HttpProcessingError

from quire.cli.bench.target import RequestUsage, Target
from quire.cli.bench.workload import BenchRequest, regular_token_ids
from quire.cli.bench_options import TargetConfig
from quire.errors import QuireError
from quire.models.checkpoints.hub import resolve_model

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection; the response itself has no time limit."""

SHOWN_OF_ERROR = 300
"""Maximum number of characters to show of a response that cannot be parsed."""


@contextlib.asynccontextmanager
async def server_target(config: TargetConfig, model: str) -> AsyncIterator[Target]:
    """Connect to the server that `config` names.

    Args:
        model: the model whose tokenizer makes the prompts.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.
        QuireError: the server cannot be reached, or does not list the model.
    """
    from quire.models.checkpoints.tokenizers.reading import read_tokenizer

    vocabulary = regular_token_ids(read_tokenizer(resolve_model(model)))
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT),
        trust_env=True,  # proxies
    ) as client:
        target = ServerTarget(client, config.base_url.rstrip("/"), vocabulary)
        await target.choose_model(config.served_model_name)
        yield target


class ServerTarget:
    """The server at `base_url`, reached through `client`; prompts consist of the ids [n] in `vocabulary`."""

    def __init__(self, client: aiohttp.ClientSession, base_url: str, vocabulary: np.ndarray) -> None:
        self.vocabulary = vocabulary
        self._client = client
        self._base_url = base_url
        self._model = ""
        self.max_model_len: int | None = None

    async def choose_model(self, name: str) -> None:
        """Use this model for requests, or the first that the server lists if `name` is empty.

        Raises:
            QuireError: the server cannot be reached, or does not list the model.
        """
        url = f"{self._base_url}/models"
        try:
            async with self._client.get(url) as response:
                body = await response.read()
        except aiohttp.ClientError as error:
            raise QuireError(f"cannot reach {url}: {_described(error)}; see --base-url") from None
        try:
            models = {model["id"]: model for model in msgspec.json.decode(body)["data"]}
        except (ValueError, KeyError, TypeError):
            raise QuireError(
                f"{url} answered {response.status} without a list of models; "
                "--base-url ends in /v1 for most servers"
            ) from None
        if not models or (name and name not in models):
            raise QuireError(f"{url} lists {', '.join(models) or 'no model'}, not {name!r}")
        self._model = name or next(iter(models))
        self.max_model_len = models[self._model].get("max_model_len")

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> RequestUsage:
        """Send a request and read its stream; an output is an event with text."""
        body = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        num_outputs = 0
        usage: dict[str, Any] = {}
        try:
            async with self._client.post(f"{self._base_url}/completions", json=body) as response:
                if not response.ok:
                    raise QuireError(_reason(response.status, await response.read()))
                async for event in _events(response):
                    if "error" in event:
                        raise QuireError(str(event["error"]))
                    usage = event.get("usage") or usage
                    if _brings_tokens(event, is_first=not num_outputs):
                        num_outputs += 1
                        on_output()
        except aiohttp.ClientError as error:
            raise QuireError(f"the connection failed: {_described(error)}") from None
        except (HttpProcessingError, ValueError) as error:  # a line is too long
            raise QuireError(f"the server sent an unreadable response: {error}") from None
        details = usage.get("prompt_tokens_details") or {}
        return RequestUsage(usage.get("completion_tokens", num_outputs), details.get("cached_tokens") or 0)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events."""
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            try:
                yield msgspec.json.decode(data, type=dict[str, Any])
            except ValueError:
                shown = data[:SHOWN_OF_ERROR].decode(errors="replace")
                raise QuireError(f"the server sent an event that is not a JSON object: {shown}") from None


def _brings_tokens(event: dict[str, Any], *, is_first: bool) -> bool:
    """Whether an event has text. The first may be empty if its token is part of a character."""
    choices = event.get("choices") or []
    return any(is_first or choice.get("text") for choice in choices)


def _reason(status: int, body: bytes) -> str:
    """Return why a server refused a request."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = msgspec.json.decode(body)["error"]["message"]
    return f"HTTP {status}: {text[:SHOWN_OF_ERROR]}"


def _described(error: aiohttp.ClientError) -> str:
    return str(error) or type(error).__name__

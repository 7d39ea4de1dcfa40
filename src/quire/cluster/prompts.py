"""Bodies of generation requests, parsed only as far as the router needs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from quire.cluster.prefixes.memory import chunk_keys
from quire.errors import InvalidRequestError
from quire.server.wire.other_names import NAMES_IN_COMPLETIONS

if TYPE_CHECKING:
    from quire.cluster.prefixes.finder import CachedPrefixes

Raw = msgspec.Raw

_OF_THE_OUTPUT = (  # parameters that do not affect the prompt's KV
    "beam_width",
    "best_of",
    "diversity_penalty",
    "echo",
    "length_penalty",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "num_beam_groups",
    "prompt_logprobs",
    "response_format",
    "return_token_ids",
    "stop",
    "stop_criteria",
    "stream_options",
    "structured_outputs",
    "top_logprobs",
    "use_beam_search",
    *NAMES_IN_COMPLETIONS,
)
_UNSPLIT = ("prompt_logprobs", "echo", "truncate_prompt_tokens")
_ONE_TOKEN = {"max_tokens": Raw(b"1"), "n": Raw(b"1"), "stream": Raw(b"false")}
_ENGINE_ONLY = "kv_transfer_params"


class _Named(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_encode = msgspec.json.Encoder().encode


class Prompt:
    """A prompt as the router sees it.

    Args:
        content: the JSON as the client wrote it.
        salt: the JSON of the request's `cache_salt`.
        model: name of the model that is to answer; empty: any.
    """

    def __init__(self, content: bytes, salt: bytes = b"", model: str = "") -> None:
        self.content = content
        self.model = model
        self.cached: CachedPrefixes | None = None  # on engines whose KV events are followed
        self._salt = salt

    @functools.cached_property
    def chunk_keys(self) -> list[int]:
        """Keys of its chunks, see `quire.cluster.prefixes.memory`."""
        return chunk_keys(self.content, self._salt)


def named_model(body: bytes) -> str:
    """Return the model that a JSON body names; empty if there is none, or the body is invalid."""
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""


class OtherBody:
    """The body of a request that generates nothing.

    Args:
        body: as the client sent it.
        model: name of the model that is to answer; empty: any.
    """

    def __init__(self, body: bytes, model: str = "") -> None:
        self._body = body
        self.prompt = Prompt(b"", model=model)

    def for_answer(self, params: Raw | None) -> bytes:
        """Return the body for the answering engine: the client's, as there is no KV."""
        return self._body


class GenerationBody:
    """The body of a request to /v1/completions or /v1/chat/completions.

    Only its top level is parsed, which takes about a millisecond per megabyte. Engines report other errors.

    Args:
        body: as the client sent it.

    Raises:
        InvalidRequestError: it is not a JSON object.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        try:
            self._fields = _decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the body is not a JSON object: {error}") from None
        self._is_as_sent = _ENGINE_ONLY not in self._fields
        self._fields.pop(_ENGINE_ONLY, None)  # not accepted from clients
        content = self._fields.get("messages", self._fields.get("prompt", b""))
        model = named_model(b'{"model":%b}' % bytes(self._fields.get("model", b'""')))
        self.prompt = Prompt(bytes(content), bytes(self._fields.get("cache_salt", b"")), model)

    @property
    def can_be_split(self) -> bool:
        """Whether one engine can compute the prompt and another one decode.

        Several prompts would have separate KV. Prompt log-probabilities need the logits of all tokens, so
        KV from elsewhere does not help. Truncation may depend on `max_tokens`, which differs for prefill.
        """
        has_one_prompt = "messages" in self._fields or _is_one_prompt(self.prompt.content)
        return has_one_prompt and not any(map(self._has, _UNSPLIT))

    def for_prefill(self, params: Mapping[str, object]) -> bytes:
        """Return the body that computes the prompt, and one token.

        Args:
            params: its `kv_transfer_params`.
        """
        fields = {name: value for name, value in self._fields.items() if name not in _OF_THE_OUTPUT}
        return _encode({**fields, **_ONE_TOKEN, _ENGINE_ONLY: params})

    def for_answer(self, params: Raw | None) -> bytes:
        """Return the body for the answering engine.

        Args:
            params: its `kv_transfer_params`; None: the answering engine computes the prompt itself.
        """
        if params is not None:
            return _encode({**self._fields, _ENGINE_ONLY: params})
        return self._body if self._is_as_sent else _encode(self._fields)

    def _has(self, name: str) -> bool:
        return bytes(self._fields.get(name, b"null")) not in (b"null", b"false")


def _is_one_prompt(content: bytes) -> bool:
    """Return whether this JSON is one text or one list of token ids, perhaps as a list's only element."""
    is_list_of_prompts = content.startswith(b"[") and content[1:].lstrip().startswith((b"[", b'"'))
    return not is_list_of_prompts or len(_decode_list(content)) == 1

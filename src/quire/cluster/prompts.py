"""Bodies of generation requests, read only as far as the router must."""

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

_OF_THE_OUTPUT = (  # parameters that have no influence on the KV of the prompt
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
_BETWEEN_ENGINES = "kv_transfer_params"

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_encode = msgspec.json.Encoder().encode


class Prompt:
    """A prompt as the router sees it.

    Args:
        content: as JSON, as the client wrote it.
        salt: the request's `cache_salt`, the same way.
    """

    def __init__(self, content: bytes, salt: bytes = b"") -> None:
        self.content = content
        self.cached: CachedPrefixes | None = None  # by engines whose KV events are followed
        self._salt = salt

    @functools.cached_property
    def chunk_keys(self) -> list[int]:
        """Keys of its chunks, see `quire.cluster.prefixes.memory`."""
        return chunk_keys(self.content, self._salt)


class OtherBody:
    """The body of a request that generates nothing.

    Args:
        body: as the client sent it.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.prompt = Prompt(b"")

    def for_answer(self, params: Raw | None) -> bytes:
        """Return the body that has the request answered: the client's, since it has no KV."""
        return self._body


class GenerationBody:
    """The body of a request to /v1/completions or /v1/chat/completions.

    Only its top level is parsed, which takes about a millisecond for a megabyte. An engine reports any other
    error in it.

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
        self._is_as_sent = _BETWEEN_ENGINES not in self._fields
        self._fields.pop(_BETWEEN_ENGINES, None)  # a client's are not for engines
        content = self._fields.get("messages", self._fields.get("prompt", b""))
        self.prompt = Prompt(bytes(content), bytes(self._fields.get("cache_salt", b"")))

    @property
    def can_be_split(self) -> bool:
        """Whether one engine can compute the prompt and another go on.

        Of several prompts, each would have KV of its own; and the log-probabilities of a prompt need the
        logits of all of its tokens, so that no KV can be taken from elsewhere. How much of a prompt is cut
        off may depend on `max_tokens`, which is another one for prefill.
        """
        has_one_prompt = "messages" in self._fields or _is_one_prompt(self.prompt.content)
        return has_one_prompt and not any(map(self._has, _UNSPLIT))

    def for_prefill(self, params: Mapping[str, object]) -> bytes:
        """Return the body that has the prompt computed, and one token.

        Args:
            params: its `kv_transfer_params`.
        """
        fields = {name: value for name, value in self._fields.items() if name not in _OF_THE_OUTPUT}
        return _encode({**fields, **_ONE_TOKEN, _BETWEEN_ENGINES: params})

    def for_answer(self, params: Raw | None) -> bytes:
        """Return the body that has the request answered.

        Args:
            params: its `kv_transfer_params`; None: the engine that answers computes the prompt itself.
        """
        if params is not None:
            return _encode({**self._fields, _BETWEEN_ENGINES: params})
        return self._body if self._is_as_sent else _encode(self._fields)

    def _has(self, name: str) -> bool:
        return bytes(self._fields.get(name, b"null")) not in (b"null", b"false")


def _is_one_prompt(content: bytes) -> bool:
    """Return whether this JSON is a text or the ids of its tokens, maybe as the only element of a list."""
    is_list_of_prompts = content.startswith(b"[") and content[1:].lstrip().startswith((b"[", b'"'))
    return not is_list_of_prompts or len(_decode_list(content)) == 1

"""Saving and restoring the KV of one prompt, shared by `LLM` and `AsyncLLM`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.engine.messages import Reply, RestoreKV, SaveKV
from quire.errors import KVFileError
from quire.front.arguments import TextOrTokenIds
from quire.front.live_requests import LiveRequests
from quire.sampling_params import ONE_TOKEN

_WHOLE_PROMPT = dataclasses.replace(ONE_TOKEN, prompt_logprobs=0)

Prompt = TextOrTokenIds | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a conversation."""


class KVSaving:
    """Asks the engine to save a prompt's KV, again and again while more of it gets stored.

    Attributes:
        params: of the request that computes the prompt before the next message. What is in the prefix cache
            may lack the KV of sliding windows; so if no more gets stored, the whole prompt is computed once.

    Args:
        requests: the engine's live requests.
        prompt: the prompt whose KV to save.
        path: the file to write.
        cache_salt: cache salt of the requests that computed the KV.

    Raises:
        InvalidRequestError: the prompt is invalid.
    """

    def __init__(self, requests: LiveRequests, prompt: Prompt, path: str | Path, cache_salt: str) -> None:
        is_conversation = not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping)
        inputs = requests.inputs
        prepare: Callable[..., Any] = inputs.process_chat if is_conversation else inputs.process
        request = prepare(prompt, ONE_TOKEN, cache_salt=cache_salt).core_request
        self.token_ids: list[int] = request.prompt_token_ids
        self.num_tokens = -1
        self.params = ONE_TOKEN
        self._path = _absolute(path)
        self._cache_salt = cache_salt

    def message(self, call_id: int) -> SaveKV:
        """Return the message to the engine."""
        return SaveKV(call_id, self._path, self.token_ids, self._cache_salt)

    def note(self, reply: Reply) -> bool:
        """Return whether the KV is saved; if not, compute the prompt before the next message.

        Raises:
            KVFileError: nothing more has been stored since the whole prompt was computed.
        """
        if not reply.done and reply.num_tokens <= self.num_tokens:
            if self.params is _WHOLE_PROMPT:
                raise KVFileError(
                    f"the KV tier stores only {reply.num_tokens} of the prompt's {len(self.token_ids)} "
                    "tokens; raise kv_tier_size, or use a kv_tier_path that no other engine writes to"
                )
            self.params = _WHOLE_PROMPT
        self.num_tokens = reply.num_tokens
        return reply.done


def restore_message(path: str | Path, cache_salt: str) -> Callable[[int], RestoreKV]:
    """Return a function from call id to the message that restores a file."""
    return functools.partial(RestoreKV, path=_absolute(path), cache_salt=cache_salt)


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())  # the engine process may have another directory

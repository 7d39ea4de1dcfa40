"""Finding a prompt's cached blocks on engines, by tokenizing and hashing it as engines do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pydantic import ValidationError

from quire.cluster.prefixes.block_index import EngineBlocks
from quire.dialogue.formats import call_format_of_template
from quire.dialogue.messages import template_messages
from quire.dialogue.reasoning.formats import REASONING_FORMATS, reasoning_format_of_template
from quire.errors import InvalidRequestError
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.blocks.events import HASH_BYTES
from quire.models.text.tokenizer import Tokenizer
from quire.server.openai.bodies import ChatCompletionRequest, CompletionRequest
from quire.server.wire.validation import MAX_OBJECTS, MAX_VALUES, count_outside_strings
from quire.step import IntArray

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 1 << 17
"""Maximum characters or token ids of a prompt to look up."""

NUM_THREADS = 4

_BODIES: Mapping[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}


@dataclasses.dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """The cached part of a prompt on each engine.

    Args:
        num_bytes: cached bytes of the prompt as the client wrote it, by the engine's blocks.
        digests: digests of the prompt's full blocks, in order, by block size.
    """

    num_bytes: Mapping[EngineBlocks, int]
    digests: Mapping[int, list[bytes]]

    def use(self, blocks: EngineBlocks) -> None:
        """Note that the prompt is sent to an engine."""
        blocks.use(self.digests.get(blocks.block_size, ()))


class PrefixFinder:
    """Finds the cached part of prompts on engines, in threads and within a time limit.

    Args:
        tokenizer: the engines' tokenizer.
        timeout: seconds for each prompt.
    """

    def __init__(self, tokenizer: Tokenizer, timeout: float) -> None:
        self.tokenizer = tokenizer
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-tokenize")

    async def find(
        self, path: str, body: bytes, num_bytes: int, engines: Collection[EngineBlocks]
    ) -> CachedPrefixes | None:
        """Return the cached part of a request's prompt on each engine.

        None if the request is invalid, has several prompts, or would take too long.

        Args:
            path: the request's path.
            body: the request's body.
            num_bytes: length of the prompt in the body.
            engines: the engines' blocks.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                return await loop.run_in_executor(self._threads, self._find, path, body, num_bytes, engines)
        except TimeoutError:
            return None
        except Exception:  # from the chat template or the tokenizer
            logger.exception("a prompt could not be tokenized")
            return None

    def close(self) -> None:
        """Stop accepting lookups."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(
        self, path: str, body: bytes, num_bytes: int, engines: Collection[EngineBlocks]
    ) -> CachedPrefixes | None:
        if _has_too_many_values(body):
            return None
        try:
            request = _BODIES[path].model_validate_json(body)
            length, token_ids = self._tokenized(request)
        except (ValidationError, InvalidRequestError):  # the engine reports it to the client
            return None
        if not token_ids:
            return None
        tokens = np.array(token_ids, dtype=np.int32)
        root = root_digest(salt=request.cache_salt or "")
        digests = {size: _digests(root, size, tokens) for size in {blocks.block_size for blocks in engines}}
        bytes_per_token = min(1.0, MAX_CHARACTERS / length) * num_bytes / len(token_ids)
        cached = {
            blocks: int(blocks.num_cached(digests[blocks.block_size]) * blocks.block_size * bytes_per_token)
            for blocks in engines
        }
        return CachedPrefixes(cached, digests)

    def _tokenized(self, request: ChatCompletionRequest | CompletionRequest) -> tuple[int, list[int]]:
        """Return a prompt's length in characters or ids, and the token ids of the part to look up."""
        if isinstance(request, ChatCompletionRequest):
            template = self.tokenizer.chat_template_source or ""
            reasoning_name = reasoning_format_of_template(template)
            reasoning_format = None if reasoning_name is None else REASONING_FORMATS[reasoning_name]
            use = request.tool_use()
            chat = self.tokenizer.render_chat(
                template_messages(request.given_messages(), call_format_of_template(template)),
                tools=None if use is None else [tool.for_template() for tool in use.tools],
                variables=request.thinking_options().variables(template, reasoning_format),
            )
            return len(chat.text), self.tokenizer.tokenize_chat(chat.part(0, MAX_CHARACTERS)).ids
        if len(request.prompts) > 1:
            return 0, []
        [prompt] = request.prompts
        beginning = prompt[:MAX_CHARACTERS]
        return len(prompt), self.tokenizer.encode(beginning) if isinstance(beginning, str) else beginning


def _has_too_many_values(body: bytes) -> bool:
    """Whether parsing a body would block other threads for long."""
    counts = count_outside_strings(body, b"{,")
    return counts[b"{"] > MAX_OBJECTS or counts[b","] > MAX_VALUES + MAX_CHARACTERS


def _digests(root: bytes, block_size: int, tokens: IntArray) -> list[bytes]:
    keys = SequenceKeys(root, block_size)
    keys.extend(tokens)
    return [digest[-HASH_BYTES:] for digest in keys.digests(0, len(keys))]

"""Finding a prompt's cached blocks on engines, by tokenizing and hashing it as engines do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pydantic import ValidationError

from quire.cluster.prefixes.block_index import EngineBlocks
from quire.dialogue.formats import call_format_of_template
from quire.dialogue.messages import template_messages
from quire.dialogue.reasoning.formats import REASONING_FORMATS, reasoning_format_of_template
from quire.errors import InvalidRequestError
from quire.front.text.tokenized_prompt import MAX_TOKENS, TokenizedPrompt
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.blocks.events import HASH_BYTES
from quire.models.text.template_messages import RenderedChat
from quire.models.text.tokenizer import Tokenizer
from quire.server.calls.bodies import template_options
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
        tokenized: the prompt as a `TokenizedPrompt` for engines; empty: engines tokenize it themselves.
    """

    num_bytes: Mapping[EngineBlocks, int]
    digests: Mapping[int, list[bytes]]
    tokenized: bytes = b""

    def use(self, blocks: EngineBlocks) -> None:
        """Note that the prompt is sent to an engine."""
        blocks.use(self.digests.get(blocks.block_size, ()))


class PrefixFinder:
    """Finds the cached part of prompts on engines, in threads and within a time limit.

    Args:
        tokenizers: the engines' tokenizers.
        timeout: seconds for each prompt.

    Attributes:
        tokenizers: the tokenizers by their fingerprints.
    """

    def __init__(self, tokenizers: Iterable[Tokenizer], timeout: float) -> None:
        self.tokenizers = {tokenizer.fingerprint: tokenizer for tokenizer in tokenizers}
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-tokenize")

    async def find(
        self, path: str, body: bytes, num_bytes: int, engines: Sequence[EngineBlocks]
    ) -> CachedPrefixes | None:
        """Return the cached part of a request's prompt on each engine with the tokenizer of the first.

        None if the request is invalid, has several prompts, or would take too long.

        Args:
            path: the request's path.
            body: the request's body.
            num_bytes: length of the prompt in the body.
            engines: the engines' blocks, at least one's.
        """
        tokenizer = self.tokenizers[engines[0].tokenizer]
        alike = [blocks for blocks in engines if blocks.tokenizer == engines[0].tokenizer]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                return await loop.run_in_executor(
                    self._threads, _find, tokenizer, path, body, num_bytes, alike
                )
        except TimeoutError:
            return None
        except Exception:  # from the chat template or the tokenizer
            logger.exception("a prompt could not be tokenized")
            return None

    def close(self) -> None:
        """Stop accepting lookups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _find(
    tokenizer: Tokenizer, path: str, body: bytes, num_bytes: int, engines: Sequence[EngineBlocks]
) -> CachedPrefixes | None:
    if _has_too_many_values(body):
        return None
    try:
        request = _BODIES[path].model_validate_json(body)
        text, token_ids = _tokenized(tokenizer, request)
    except (ValidationError, InvalidRequestError):  # the engine reports it to the client
        return None
    if not token_ids:
        return None
    tokens = np.array(token_ids, dtype=np.int32)
    root = root_digest(salt=request.cache_salt or "")
    digests = {size: _digests(root, size, tokens) for size in {blocks.block_size for blocks in engines}}
    bytes_per_token = min(1.0, MAX_CHARACTERS / len(text)) * num_bytes / len(token_ids)
    cached = {
        blocks: int(blocks.num_cached(digests[blocks.block_size]) * blocks.block_size * bytes_per_token)
        for blocks in engines
    }
    is_whole = len(text) <= MAX_CHARACTERS and request.truncate_prompt_tokens is None
    if not (is_whole and isinstance(text, str) and len(token_ids) <= MAX_TOKENS):
        return CachedPrefixes(cached, digests)
    tokenized = TokenizedPrompt.of(tokenizer.digest, token_ids, text)
    return CachedPrefixes(cached, digests, tokenized.encoded())


def _tokenized(
    tokenizer: Tokenizer, request: ChatCompletionRequest | CompletionRequest
) -> tuple[str | list[int], list[int]]:
    """Return a prompt, and the token ids of the part to look up."""
    if isinstance(request, ChatCompletionRequest):
        chat, adds_special_tokens = _rendered(tokenizer, request)
        part = chat if len(chat.text) <= MAX_CHARACTERS else chat.part(0, MAX_CHARACTERS)
        encoding = tokenizer.tokenize_chat(part, add_special_tokens=adds_special_tokens)
        return chat.text, encoding.ids
    if len(request.prompts) > 1:
        return "", []
    [prompt] = request.prompts
    beginning = prompt[:MAX_CHARACTERS]
    if not isinstance(beginning, str):
        return prompt, beginning
    adds_special_tokens = request.add_special_tokens is not False
    return prompt, tokenizer.encode(beginning, add_special_tokens=adds_special_tokens)


def _rendered(tokenizer: Tokenizer, request: ChatCompletionRequest) -> tuple[RenderedChat, bool]:
    """Return a conversation's text as engines render it, and whether special tokens are added to it."""
    template = tokenizer.chat_template_source or ""
    reasoning_name = reasoning_format_of_template(template)
    reasoning_format = None if reasoning_name is None else REASONING_FORMATS[reasoning_name]
    options = template_options(request, request.tool_use(), template, reasoning_format)
    adds_special_tokens: bool = options.pop("add_special_tokens", False)
    continues: bool = options.get("continue_final_message", False)
    chat = tokenizer.render_chat(
        template_messages(request.given_messages(), call_format_of_template(template)),
        add_generation_prompt=options.pop("add_generation_prompt", not continues),
        variables=options.pop("chat_template_kwargs", {}),
        **options,
    )
    return chat, adds_special_tokens


def _has_too_many_values(body: bytes) -> bool:
    """Whether parsing a body would block other threads for long."""
    counts = count_outside_strings(body, b"{,")
    return counts[b"{"] > MAX_OBJECTS or counts[b","] > MAX_VALUES + MAX_CHARACTERS


def _digests(root: bytes, block_size: int, tokens: IntArray) -> list[bytes]:
    keys = SequenceKeys(root, block_size)
    keys.extend(tokens)
    return [digest[-HASH_BYTES:] for digest in keys.digests(0, len(keys))]

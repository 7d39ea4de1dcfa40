"""Compute prompts in one process and answers in another, in PagedAttention blocks that the engine owns.

python examples/prefill_decode_blocks.py

Each side has a paged KV cache of Quire's own, and registers its memory with LLMDataDist. The PROMPT writes
to a pipe which blocks a prompt is in; the DECODER pulls them into blocks of its own, and says when it has
them. What is the same with slots is in `prefill_decode_slots.py`.
"""

import dataclasses
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from prefill_decode_slots import (
    DECODER_ID,
    MAX_NEW_TOKENS,
    MODEL,
    MODEL_PATH,
    PROMPT_ID,
    QUESTIONS,
    Request,
    link,
    next_tokens,
    start,
)

from quire.datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole
from quire.kv import PagedAttentionCache, PagedAttentionCacheMetaData
from quire.models.checkpoints.loading import load_decoder

BLOCK_SIZE = 16  # tokens
NUM_BLOCKS = 10  # on each side
KEY = BlocksCacheKey(PROMPT_ID)


@dataclasses.dataclass
class BlockRequest(Request):
    """A request with its blocks on the DECODER, enough for its whole answer."""

    blocks: list[int] = dataclasses.field(default_factory=list)


class BlockEngine:
    """The model, its paged cache, and which blocks are free."""

    def __init__(self, dist: LLMDataDist, key: BlocksCacheKey | None = None) -> None:
        metadata = PagedAttentionCacheMetaData.for_layers(
            MODEL.kv_layers, page_size=BLOCK_SIZE, dtype=MODEL.dtype, num_pages=NUM_BLOCKS
        )
        self.decoder = load_decoder(MODEL_PATH, MODEL)
        self.cache = PagedAttentionCache.init_cache(None, metadata)
        self.free = list(range(NUM_BLOCKS))
        # All layers of a block are one span of bytes, and so the cache is one tensor for LLMDataDist.
        desc = CacheDesc(1, [NUM_BLOCKS, self.cache.bytes_per_block], DataType.DT_UINT8)
        address = self.cache.tensor.data_ptr()
        self.registered = dist.kv_cache_manager.register_blocks_cache(desc, [address], key)

    def take_blocks(self, num_tokens: int) -> list[int]:
        """Return blocks for so many tokens, or none if too few are free."""
        count = -(-num_tokens // BLOCK_SIZE)
        if count > NUM_BLOCKS:
            raise ValueError(f"{num_tokens} tokens need {count} blocks, more than NUM_BLOCKS, {NUM_BLOCKS}")
        if count > len(self.free):
            return []
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def serve_prompts() -> None:
    """Be the PROMPT: compute the prompts that are read as there are blocks, and write where they are."""
    dist = start(LLMRole.PROMPT, PROMPT_ID)
    engine = BlockEngine(dist, KEY)
    print(dist.listen_port, flush=True)
    waiting: deque[list[int]] = deque()
    for line in sys.stdin:
        message = json.loads(line)
        waiting += message.get("prompts", [])
        engine.free += message.get("pulled_blocks", [])
        while waiting and (blocks := engine.take_blocks(len(waiting[0]))):
            [token] = next_tokens(
                engine.decoder, engine.cache, [waiting.popleft()], num_computed=[0], block_tables=[blocks]
            )
            print(json.dumps({"token": token, "blocks": blocks}), flush=True)
    dist.finalize()


def send(prompt: subprocess.Popen[str], **message: Any) -> None:
    """Send a message to the PROMPT."""
    print(json.dumps(message), file=prompt.stdin, flush=True)


def pull(
    dist: LLMDataDist, engine: BlockEngine, request: BlockRequest, prompt: subprocess.Popen[str]
) -> None:
    """Wait until a request's prompt is computed, and pull it."""
    message = json.loads(prompt.stdout.readline())
    sources = message["blocks"]
    dist.kv_cache_manager.pull_blocks(KEY, engine.registered, sources, request.blocks[: len(sources)])
    send(prompt, pulled_blocks=sources)
    request.answer.append(message["token"])


def decoded(
    dist: LLMDataDist, engine: BlockEngine, requests: list[BlockRequest], prompt: subprocess.Popen[str]
) -> Iterator[BlockRequest]:
    """Complete the answers, and yield each request; others get its blocks."""
    send(prompt, prompts=[request.prompt for request in requests])
    waiting = deque(requests)
    running: list[BlockRequest] = []
    while waiting or running:
        while waiting and (blocks := engine.take_blocks(len(waiting[0].prompt) + MAX_NEW_TOKENS)):
            request = waiting.popleft()
            request.blocks = blocks
            pull(dist, engine, request, prompt)
            running.append(request)
        decode_step(engine, [request for request in running if not request.is_finished])
        for request in [one for one in running if one.is_finished]:
            running.remove(request)
            engine.free += request.blocks
            yield request


def decode_step(engine: BlockEngine, requests: list[BlockRequest]) -> None:
    """Add a token to each answer."""
    if not requests:
        return
    tokens = next_tokens(
        engine.decoder,
        engine.cache,
        [request.answer[-1:] for request in requests],
        num_computed=[request.num_computed for request in requests],
        block_tables=[request.blocks for request in requests],
    )
    for request, token in zip(requests, tokens, strict=True):
        request.answer.append(token)


def main() -> None:
    """Be the DECODER: print the answers in the order in which they are complete."""
    command = [sys.executable, __file__, "prompt"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prompt:
        dist = start(LLMRole.DECODER, DECODER_ID)
        engine = BlockEngine(dist)
        link(dist, json.loads(prompt.stdout.readline()))
        requests = [BlockRequest(req_id, question) for req_id, question in enumerate(QUESTIONS)]
        for request in decoded(dist, engine, requests, prompt):
            request.show(f"blocks {request.blocks}")
        dist.finalize()


if __name__ == "__main__":
    serve_prompts() if "prompt" in sys.argv else main()

"""What engines have cached of a prompt: for bodies of all kinds, and those that nothing can be said of."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from quire.cluster.block_index import EngineBlocks
from quire.cluster.prefix_finder import MAX_CHARACTERS, PrefixFinder
from quire.kv.block_hash import SequenceKeys, root_digest
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizer_reading import read_tokenizer
from quire.server.protocol import MAX_OBJECTS, MAX_VALUES

PATIENCE = 60.0  # seconds, for what comes at once
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
WORDS = "Blocks of tokens are what engines cache. " * 10


@pytest.fixture
def tokenizer():
    return read_tokenizer(resolve_model("mini"))


@pytest.fixture
def lookup(tokenizer):
    lookup = PrefixFinder(tokenizer, PATIENCE)
    yield lookup
    lookup.close()


def with_blocks(digests, block_size):
    blocks = EngineBlocks(block_size)
    blocks.add(digests)
    return blocks


def digests_of(tokens, block_size, salt=""):
    keys = SequenceKeys(root_digest(salt=salt), block_size)
    keys.extend(np.array(tokens, dtype=np.int32))
    return [key.digest for key in (keys[index] for index in range(len(keys)))]


async def found(lookup, path, engines, **fields):
    body = json.dumps({"model": "mini", **fields}).encode()
    return await lookup.find(path, body, 1000, engines)


async def test_each_engine_has_the_bytes_of_its_blocks(lookup, tokenizer):
    tokens = tokenizer.encode(WORDS)
    small, large = digests_of(tokens, 4), digests_of(tokens, 16)
    engines = [
        with_blocks(small[:5], 4),
        with_blocks(large, 16),
        with_blocks(large[2:3], 16),  # what came before was cached before its events were followed
        with_blocks([], 16),
    ]
    cached = await found(lookup, COMPLETIONS, engines, prompt=WORDS)
    share = 1000 / len(tokens)
    assert [cached.num_bytes[one] for one in engines] == [
        int(20 * share), int(16 * len(large) * share), int(48 * share), 0
    ]  # fmt: skip
    assert cached.digests == {4: small, 16: large}
    cached.use(engines[0])
    assert list(engines[0]._digests) == small[4::-1]


async def test_prompts_are_tokenized_as_engines_do_it(lookup, tokenizer):
    question = [{"role": "user", "content": WORDS}]
    chat = tokenizer.encode(tokenizer.apply_chat_template(question), add_special_tokens=False)
    for path, fields, tokens, salt in (
        (COMPLETIONS, {"prompt": WORDS}, tokenizer.encode(WORDS), ""),
        (COMPLETIONS, {"prompt": [WORDS]}, tokenizer.encode(WORDS), ""),
        (COMPLETIONS, {"prompt": [7, 8] * 20}, [7, 8] * 20, ""),
        (COMPLETIONS, {"prompt": WORDS, "cache_salt": "é"}, tokenizer.encode(WORDS), "é"),
        (CHATS, {"messages": question, "max_completion_tokens": 3, "user": "u"}, chat, ""),
    ):
        cached = await found(lookup, path, [EngineBlocks(8)], **fields)
        assert cached.digests == {8: digests_of(tokens, 8, salt)}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}),
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"prompt": WORDS, "unknown": 1}),
        (COMPLETIONS, {"prompt": [2**31]}),
        (COMPLETIONS, {"prompt": "\ud800"}),
        (CHATS, {"messages": []}),
        (CHATS, {"messages": [{"role": "user", "content": 5}]}),
        (CHATS, {"messages": "text"}),
        (CHATS, {"messages": [{"role": "user", "content": "a"}] * (MAX_OBJECTS + 1)}),
        (COMPLETIONS, {"prompt": [1] * (MAX_VALUES + MAX_CHARACTERS + 9)}),
    ],
)
async def test_there_is_nothing_to_say_of_what_is_invalid_or_several(lookup, path, fields):
    assert await found(lookup, path, [EngineBlocks(16)], **fields) is None


async def test_of_a_long_prompt_only_the_beginning_is_looked_at(lookup):
    prompt = [5] * (MAX_CHARACTERS * 5 // 4)
    cached = await found(lookup, COMPLETIONS, [EngineBlocks(1 << 10)], prompt=prompt)
    [digests] = cached.digests.values()
    assert len(digests) == MAX_CHARACTERS >> 10
    engine = with_blocks(digests, 1 << 10)
    cached = await found(lookup, COMPLETIONS, [engine], prompt=prompt)
    assert cached.num_bytes[engine] == 800


async def test_a_tokenizer_that_fails_or_hangs_costs_no_request(lookup, tokenizer, monkeypatch, caplog):
    def fail(text):
        raise ArithmeticError("no such character")

    monkeypatch.setattr(tokenizer, "encode", fail)
    assert await found(lookup, COMPLETIONS, [EngineBlocks(16)], prompt=WORDS) is None
    assert "no such character" in caplog.text

    released = threading.Event()
    monkeypatch.setattr(tokenizer, "encode", lambda text: released.wait(PATIENCE) and [])
    lookup._timeout = 0.01
    async with asyncio.timeout(PATIENCE):
        for _ in range(9):  # more than there are threads
            assert await found(lookup, COMPLETIONS, [EngineBlocks(16)], prompt=WORDS) is None
    released.set()

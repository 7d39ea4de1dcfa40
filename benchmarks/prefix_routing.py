"""How much of prompts each way of routing finds in prefix caches: conversations over several engines.

Conversations of several turns begin with one of a few system prompts, and come in turns, some at a time.
Each way gets engines of its own, with too little memory for all conversations. Printed is the share of
prompt tokens found cached, also as a part of what one engine with the memory of all would find. `tree`
is the text tree of Ray's PrefixCacheAffinityRouter, with its defaults, where `ray` is installed (pip
install 'quire[ray]').

    python benchmarks/prefix_routing.py [--conversations 200] [--turns 4] [--at-once 16] [--engines 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

KV_BLOCKS = 768  # of each engine
NUM_SYSTEM_PROMPTS = 8
MAX_TOKENS = 16
MATCH_RATE = 0.1  # Ray's match_rate_threshold

Conversation = list[dict[str, str]]


def conversations(number: int, num_turns: int, seed: int) -> list[list[str]]:
    """Return the system prompt and what the user says in each turn, for each conversation."""
    rng = random.Random(seed)
    words = [
        "the",
        "sea",
        "a",
        "ship",
        "wind",
        "is",
        "it",
        "slow",
        "night",
        "and",
        "who",
        "goes",
        "there",
        "far",
        "away",
        "one",
        "old",
        "house",
        "door",
    ]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, k=num_words))

    systems = [text(500) for _ in range(NUM_SYSTEM_PROMPTS)]
    return [
        [rng.choice(systems), *(text(rng.randint(60, 120)) for _ in range(num_turns))] for _ in range(number)
    ]


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[str]:
    """Run a command of Quire while the block lasts; yields its URL."""
    command = [sys.executable, "-m", "quire.cli.main", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        yield line.split()[1]
    finally:
        process.terminate()
        process.wait()


@contextlib.asynccontextmanager
async def engines(number: int, num_blocks: int) -> AsyncIterator[list[str]]:
    """Run engines while the block lasts; yields their URLs."""
    events = ["--kv-events-endpoint", "tcp://127.0.0.1:*", "--kv-events-replay-endpoint", "tcp://127.0.0.1:*"]
    options = ["--num-threads", "1", "--num-kv-blocks", str(num_blocks), "--no-standby-engine", *events]
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(started("serve", "mini", *options)) for _ in range(number)]


class Tree:
    """Chooses as Ray's PrefixCacheAffinityRouter does by default, where queues always count as balanced."""

    def __init__(self, urls: list[str]) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree = PrefixTree()
        self._tree.add_tenants(urls, time.time())
        self._running: Counter[str] = Counter()

    def choose(self, text: str) -> str:
        """Return the engine for a prompt: the least loaded of those with the longest match."""
        matched, found = self._tree.prefix_match(text, None)
        if len(matched) < MATCH_RATE * len(text) or not found:
            found = self._tree.get_smallest_tenants()
        url = min(found, key=self._running.__getitem__)
        self._tree.insert(text, url, time.time())
        self._running[url] += 1
        return url

    def note_end(self, url: str) -> None:
        """Note that a request has ended."""
        self._running[url] -= 1


async def share_found(
    told: list[list[str]], at_once: int, choose: Callable[[str], str], note_end: Callable[[str], None]
) -> float:
    """Have the conversations; return the share of prompt tokens that were cached."""
    num_tokens = num_cached = 0
    waiting: list[tuple[Conversation, list[str]]] = [
        ([{"role": "system", "content": s}], t) for s, *t in told
    ]

    async def take_turns(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens, num_cached
        while waiting:
            messages, left = waiting.pop(0)
            messages.append({"role": "user", "content": left[0]})
            url = choose("\n".join(one["content"] for one in messages))
            body: dict[str, Any] = {"model": "mini", "messages": messages, "max_tokens": MAX_TOKENS}
            async with session.post(f"{url}/v1/chat/completions", json=body | {"temperature": 0}) as response:
                answer = await response.json()
            note_end(url)
            usage = answer["usage"]
            num_tokens += usage["prompt_tokens"]
            num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            if left[1:]:
                waiting.insert(min(len(waiting), 2 * at_once), (messages, left[1:]))

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(take_turns(session) for _ in range(at_once)))
    return num_cached / num_tokens


async def main() -> None:
    """Try each way of routing, and print its share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    told = conversations(options.conversations, options.turns, options.seed)
    rng = random.Random(options.seed)

    async def measure(name: str, way: Callable[[list[str]], Any], num_blocks: int = KV_BLOCKS) -> float:
        number = options.engines if num_blocks == KV_BLOCKS else 1
        async with contextlib.AsyncExitStack() as stack:
            urls = await stack.enter_async_context(engines(number, num_blocks))
            chosen = way(urls)
            if isinstance(chosen, list):  # arguments of the router
                url = await stack.enter_async_context(started("route", *chosen))
                choose, note_end = (lambda _: url), (lambda _: None)
            else:
                choose, note_end = chosen
            share = await share_found(told, options.at_once, choose, note_end)
        print(
            f"| {name} | {share:.1%} | {share / one:.1%} |" if one else f"| {name} | {share:.1%} | |",
            flush=True,
        )
        return share

    def ignore(_: str) -> None: ...

    def router(*more: str) -> Callable[[list[str]], list[str]]:
        return lambda urls: [part for url in urls for part in ("--engine", url)] + list(more)

    def tree(urls: list[str]) -> Any:
        routed = Tree(urls)
        return routed.choose, routed.note_end

    def round_robin(urls: list[str]) -> Any:
        turns = itertools.cycle(urls)
        return (lambda _: next(turns)), ignore

    print("| way of routing | prompt tokens found | of what one engine finds |\n|---|---|---|")
    one = 0.0
    one = await measure("one engine with all the memory", lambda urls: ((lambda _: urls[0]), ignore),
                        options.engines * KV_BLOCKS)  # fmt: skip
    await measure("quire route, KV events", router("--tokenizer", "mini"))
    await measure("quire route, text", router())
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        print("| tree: ray is not installed | | |")
    else:
        await measure("tree", tree)
    await measure("round robin", round_robin)
    await measure("random", lambda urls: ((lambda _: rng.choice(urls)), ignore))


if __name__ == "__main__":
    asyncio.run(main())

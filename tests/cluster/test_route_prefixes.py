"""Requests go where their prompts are cached: real engines, asked beside the router and through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from hashlib import blake2b

import httpx
import msgspec
import pytest
from fake_upstream import FakeEngine, check_health, chunks_in_flight
from test_route_continuation import Breaking, answer_of

import preloaded
from quire import AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
from quire.cluster.route import routing
from quire.config import ConnectionConfig, KVEventsConfig, RouterConfig, ServerConfig
from quire.engine.kv_events import KVEventPublisher
from quire.front.text.tokenized_prompt import MAX_BYTES, TokenizedPrompt
from quire.kv.blocks.events import BlockStored
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.server.app import create_app
from quire.server.http.listening import bound_socket, url_of
from quire.server.http.server import HttpServer

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 60.0  # seconds, for what comes at once
ONE_TOKEN = SamplingParams(max_tokens=1)
FOX = "The quick brown fox jumps over the lazy dog, and then again. " * 4
SHIP = "A ship in harbour is safe, but that is not what ships are for. " * 4
QUESTION = [
    {"role": "system", "content": SHIP},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What are "}, {"type": "text", "text": "they for?"}],
    },
]
JOINED = [QUESTION[0], {"role": "user", "content": "What are they for?"}]


def started() -> AsyncLLM:
    config = EngineConfig(
        num_threads=1,
        kv_events=KVEventsConfig(kv_events_endpoint=LOCAL, kv_events_replay_endpoint=LOCAL),
        scheduler=SchedulerConfig(num_kv_blocks=256),
    )
    with preloaded.engines():
        return AsyncLLM(config)


@pytest.fixture(scope="module")
def llms():
    llms = [started(), started()]
    yield llms
    for llm in llms:
        asyncio.run(llm.shutdown())


class Cluster:
    """Two engines behind a router, all in this event loop."""

    def __init__(self, llms):
        self.llms = llms
        self.ports = [0, 0]
        self.cuts = []  # after how many bytes the next answers break off
        self._serving = [contextlib.AsyncExitStack() for _ in llms]

    @property
    def urls(self):
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def start(self, index):
        """Serve an engine, at the port that it had before."""
        llm = self.llms[index]
        await llm.wait_until_ready()
        assert await llm.reset_prefix_cache()
        stack = self._serving[index]
        bound = stack.enter_context(contextlib.closing(bound_socket("127.0.0.1", self.ports[index])))
        self.ports[index] = bound.getsockname()[1]
        server = HttpServer(Breaking(create_app(llm, ServerConfig()), self.cuts), ConnectionConfig())
        await stack.enter_async_context(server.serving(bound))

    async def stop(self, index):
        await self._serving[index].aclose()

    async def restart(self, index):
        """Stop an engine, and serve another one in its place."""
        await self.stop(index)
        await self.llms[index].shutdown()
        self.llms[index] = started()
        await self.start(index)

    @contextlib.asynccontextmanager
    async def routed(self, **config):
        """Serve the engines and a router for the duration of the context."""
        settings = {"tokenizer": ("mini",), "tokenize_timeout": PATIENCE, "health_interval": 0.1, **config}
        with contextlib.closing(bound_socket("127.0.0.1", 0)) as front:
            try:
                for index in range(len(self.llms)):
                    await self.start(index)
                async with (
                    routing(RouterConfig(engine=tuple(self.urls), **settings), front) as self.router,
                    httpx.AsyncClient(base_url=url_of("127.0.0.1", front), timeout=None) as self.http,
                ):
                    yield self
            finally:
                for index in range(len(self.llms)):
                    await self.stop(index)

    def num_known(self):
        """Number of blocks that each engine is known to have cached."""
        all_blocks = [self.router.engines.by_url[url].blocks for url in self.urls]
        return [None if blocks is None else len(blocks) for blocks in all_blocks]

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition(*self.num_known()):
                await asyncio.sleep(0)

    async def cache(self, index, prompt, **options):
        """Have an engine cache a prompt behind the router's back, and wait until its events say so."""
        before = self.num_known()[index] or 0
        ask = self.llms[index].generate if isinstance(prompt, str) else self.llms[index].chat
        async for _ in ask(prompt, ONE_TOKEN, **options):
            pass
        await self.until(lambda *known: (known[index] or 0) > before)

    async def chosen(self, path="/v1/completions", **fields):
        """Return which engine gets a request."""
        counts = self.answers()
        body = {"model": "mini", "max_tokens": 1, **fields}
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        [index] = [index for index, count in enumerate(self.answers()) if count != counts[index]]
        return index

    def answers(self):
        return [self.metric(f'engine_requests_total{{engine="{url}",purpose="answer"}}') for url in self.urls]

    def metric(self, name):
        found = re.search(
            rf"^quire_route_{re.escape(name)} (.*)$", self.router.metrics.exposition().decode(), re.MULTILINE
        )
        return 0.0 if found is None else float(found[1])


@pytest.fixture
async def cluster(llms):
    async with Cluster(llms).routed() as cluster:
        await cluster.until(lambda *known: None not in known)
        yield cluster


async def test_prompts_go_to_the_engine_that_has_cached_them(cluster):
    await cluster.cache(0, FOX)
    await cluster.cache(1, JOINED)
    for _ in range(3):
        assert await cluster.chosen(prompt=FOX + "And?") == 0
        assert await cluster.chosen("/v1/chat/completions", messages=QUESTION) == 1
    assert await cluster.chosen(prompt=[*cluster.llms[0].tokenizer.encode(FOX), 7]) == 0
    assert cluster.metric('prefix_lookups_total{source="events"}') == 7
    assert cluster.metric('prefix_hits_total{source="events"}') == 7
    assert cluster.metric('prefix_hit_bytes_total{source="events"}') > 3 * len(FOX)
    assert cluster.metric('prefix_lookups_total{source="text"}') == 0
    assert cluster.metric("not_tokenized_total") == 0


async def test_a_prompt_with_another_salt_is_another_prompt(cluster):
    await cluster.cache(0, FOX)
    await cluster.cache(1, FOX, cache_salt="tenant")
    for _ in range(2):
        assert await cluster.chosen(prompt=FOX, cache_salt="tenant") == 1
        assert await cluster.chosen(prompt=FOX) == 0


async def test_the_longer_cached_prefix_wins_until_it_is_cleared(cluster):
    await cluster.cache(0, FOX)
    await cluster.cache(1, FOX[: len(FOX) // 2])
    assert await cluster.chosen(prompt=FOX) == 0
    assert await cluster.llms[0].reset_prefix_cache()
    await cluster.until(lambda first, second: first == 0)
    assert await cluster.chosen(prompt=FOX) == 1


async def test_a_longer_queue_outweighs_what_is_cached(cluster):
    await cluster.cache(0, FOX)
    engine = cluster.router.engines.by_url[cluster.urls[0]]
    with engine.serving(5 * len(FOX)):
        assert await cluster.chosen(prompt=FOX) == 1


async def test_an_engine_that_was_restarted_has_nothing_cached(cluster):
    await cluster.cache(0, FOX)
    await cluster.cache(1, FOX[: len(FOX) // 2])
    assert await cluster.chosen(prompt=FOX) == 0
    await cluster.restart(0)
    await cluster.until(lambda first, second: first == 0)
    assert await cluster.chosen(prompt=FOX) == 1


async def test_what_cannot_be_tokenized_in_time_is_chosen_by_its_text(llms):
    async with Cluster(llms).routed(tokenize_timeout=1e-9) as cluster:
        await cluster.until(lambda *known: None not in known)
        chosen = await cluster.chosen(prompt=FOX * 4)
        assert [await cluster.chosen(prompt=FOX * 4) for _ in range(3)] == [chosen] * 3
        assert cluster.metric("not_tokenized_total") == 4
        assert cluster.metric('prefix_hits_total{source="text"}') == 3
        assert cluster.metric('prefix_lookups_total{source="events"}') == 0


async def test_an_engine_with_another_tokenizer_is_not_followed(llms, tmp_path, caplog):
    for file in resolve_model("mini").glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    async with Cluster(llms).routed(tokenizer=(str(tmp_path),)) as cluster:
        await cluster.chosen(prompt=FOX)
        assert cluster.num_known() == [None, None]
        assert sum("its tokenizer is none of the router's" in text for text in caplog.messages) == 2


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONTINUED = [*JOINED, {"role": "assistant", "content": "They "}]
BODIES = [
    (CHAT, {"messages": QUESTION, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}),
    (
        CHAT,
        {
            "messages": JOINED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    (
        CHAT,
        {"messages": [*JOINED, {"role": "assistant", "content": "They "}], "continue_final_message": True},
    ),
    (CHAT, {"messages": JOINED, "add_generation_prompt": False, "add_special_tokens": True}),
    (CHAT, {"messages": JOINED, "prompt_logprobs": 1, "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": JOINED, "reasoning_effort": "low", "stop": ["e"]}),
    (COMPLETIONS, {"prompt": FOX, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": FOX, "add_special_tokens": False, "n": 2, "prompt_logprobs": 0}),
]


@pytest.fixture
def no_tokenizing(cluster, monkeypatch):
    """Engines can neither render nor tokenize prompts."""

    def refuse(*args, **options):
        raise AssertionError("the engine tokenizes")

    def begin():
        for llm in cluster.llms:
            monkeypatch.setattr(llm.tokenizer, "render_chat", refuse)
            monkeypatch.setattr(llm.tokenizer, "tokenize_chat", refuse)

    return begin


def compared(answer):
    """What is the same in each answer to a request."""
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    answer["usage"].pop("prompt_tokens_details")
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return [answer.get(name) for name in ("choices", "usage", "prompt_token_ids", "prompt_logprobs")]


@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_engines_do_not_tokenize_what_the_router_has(cluster, no_tokenizing, path, fields):
    body = {"model": "mini", "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=None) as direct:
        expected = compared(await direct.post(path, json=body))
    no_tokenizing()
    assert compared(await cluster.http.post(path, json=body)) == expected


@pytest.mark.parametrize("fields", [{"prompt": [FOX, SHIP]}, {"prompt": FOX, "truncate_prompt_tokens": 9}])
async def test_engines_tokenize_what_the_router_has_not(cluster, no_tokenizing, fields):
    body = {"model": "mini", "max_tokens": 1, **fields}
    assert (await cluster.http.post(COMPLETIONS, json=body)).status_code == 200
    no_tokenizing()
    assert (await cluster.http.post(COMPLETIONS, json=body)).status_code == 500


async def test_another_engine_gets_the_tokens_of_a_stream_that_it_continues(cluster, no_tokenizing):
    body = {
        "model": "mini",
        "messages": QUESTION,
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "seed": 3,
    }
    async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=None) as direct:
        expected = answer_of(await direct.post(CHAT, json=body))
    no_tokenizing()
    cluster.cuts[:] = [1500]
    assert answer_of(await cluster.http.post(CHAT, json=body)) == expected
    assert cluster.metric("continued_streams_total") == 1


def forged(llm, **changes):
    """What a client may send behind a body that a router would not."""
    ids = changes.pop("ids", [5, 6, 7])
    prompt = TokenizedPrompt.of(changes.pop("digest", llm.tokenizer.digest), ids, "")
    return prompt.encoded()


async def test_engines_check_the_tokens_of_others(cluster):
    [llm, _] = cluster.llms
    body = {"model": "mini", "messages": JOINED, "max_tokens": 1, "return_token_ids": True}
    size = llm.info.vocab_size
    async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=None) as direct:

        async def ask(behind, path=CHAT, **fields):
            headers = {"Content-Type": "application/json", "X-Quire-Prompt": str(len(behind))}
            content = json.dumps({**body, **fields}).encode() + behind
            return await direct.post(path, content=content, headers=headers)

        tokens = compared(await direct.post(CHAT, json=body))[2]
        for ignored in (forged(llm, digest="x"), forged(llm, ids=[]), forged(llm, ids=[1] * 5000)):
            assert compared(await ask(ignored))[2] == tokens
        assert compared(await ask(forged(llm)))[2] == [5, 6, 7]
        truncated = await ask(forged(llm), truncate_prompt_tokens=4)
        assert compared(truncated)[2] == tokens[-4:]
        odd = msgspec.msgpack.encode([llm.tokenizer.digest, b"123", ""])
        for wrong in (b"x", b"\xc1" * 9, odd, forged(llm, ids=[size]), forged(llm, ids=[-1])):
            answer = await ask(wrong)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] in ("X-Quire-Prompt", "messages")
        for wrong in (b"", bytes(MAX_BYTES + 1)):
            assert (await ask(wrong)).status_code == 400
        del body["messages"]
        answer = await ask(forged(llm), COMPLETIONS, prompt=["a", "b"])
        assert answer.json()["error"]["param"] == "X-Quire-Prompt"


async def test_clients_of_the_router_send_no_tokens(routed, publishers):
    prefill, decode = fake_engines(publishers)
    tokenizer = read_tokenizer(resolve_model("mini"))
    for engine in (prefill, decode):
        engine.kv_events["prompts"] = tokenizer.digest
    http, router = await routed(
        prefill=[prefill],
        decode=[decode],
        tokenizer=("mini",),
        tokenize_timeout=PATIENCE,
        kv_transfer="sequential",
    )
    known = [router.engines.by_url[one.url] for one in (prefill, decode)]
    await until(lambda: all(one.blocks is not None for one in known))
    headers = {"X-Quire-Prompt": "3"}
    await http.post(COMPLETIONS, json={"model": "m", "prompt": SHIP}, headers=headers)
    for engine in (prefill, decode):
        [seen] = engine.seen
        behind = seen.content[-int(seen.headers["x-quire-prompt"]) :]
        assert TokenizedPrompt.decoded(behind).token_ids() == tokenizer.encode(SHIP)
        assert json.loads(seen.content.removesuffix(behind))["prompt"] == SHIP
    await http.post(COMPLETIONS, json={"model": "m", "prompt": [SHIP, FOX]}, headers=headers)
    await http.get("/v1/models", headers=headers)
    assert not any("x-quire-prompt" in seen.headers for seen in decode.seen[1:])
    decode.kv_events["prompts"] = "another"
    await check_health(router, known[1])
    await http.post(COMPLETIONS, json={"model": "m", "prompt": SHIP})
    assert "x-quire-prompt" not in decode.seen[-1].headers


@pytest.fixture
def publishers():
    """Those of two fake engines."""
    publishers = [KVEventPublisher(LOCAL, LOCAL, topic="kv@pod@model") for _ in range(2)]
    yield publishers
    for publisher in publishers:
        publisher.close()


def fake_engines(publishers):
    engines = [FakeEngine() for _ in publishers]
    fingerprint = read_tokenizer(resolve_model("mini")).fingerprint
    for engine, publisher in zip(engines, publishers, strict=True):
        port, replay_port = publisher.tcp_ports
        engine.kv_events = {"port": port, "replay_port": replay_port, "tokenizer": fingerprint}
    return engines


def stored(prompt, *, salt=""):
    """The event that all full blocks of a prompt have been cached, computed without the engine."""
    tokens = read_tokenizer(resolve_model("mini")).encode(prompt)
    digests, digest = [], blake2b(_salted(salt), digest_size=16).digest()
    for start in range(0, len(tokens) // 16 * 16, 16):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + 16])
        digest = blake2b(digest + block, digest_size=16).digest()
        digests.append(int.from_bytes(digest[-8:]))
    return BlockStored(
        block_hashes=digests, parent_block_hash=None, token_ids=tokens[: 16 * len(digests)],
        block_size=16, lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip


def _salted(salt):
    parts = [b"salt", salt.encode()] if salt else []
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


async def ask(http, prompt):
    assert (await http.post("/v1/completions", json={"model": "m", "prompt": prompt})).status_code == 200


async def test_without_its_events_an_engine_is_known_by_the_text_that_it_was_sent(routed, publishers):
    first, second = fake_engines(publishers)
    publishers[1].publish([stored(FOX * 4)])
    http, router = await routed(
        engine=[first, second],
        tokenizer=("mini",),
        health_interval=0.05,
        connect_timeout=0.5,
        tokenize_timeout=PATIENCE,
    )
    known = [router.engines.by_url[one.url] for one in (first, second)]
    await until(lambda: all(one.blocks is not None for one in known))
    await ask(http, FOX * 4)
    assert (len(first.seen), len(second.seen)) == (0, 1)
    publishers[1].close()
    await until(lambda: known[1].blocks is None)
    await ask(http, FOX * 4)
    assert (len(first.seen), len(second.seen)) == (0, 2)
    lines = router.metrics.exposition().decode().splitlines()
    for line in (
        'quire_route_prefix_hits_total{source="events"} 1.0',
        'quire_route_prefix_hits_total{source="text"} 1.0',
        f'quire_route_engine_followed{{engine="{first.url}",role="both"}} 1.0',
        f'quire_route_engine_followed{{engine="{second.url}",role="both"}} 0.0',
        f'quire_route_engine_cached_blocks{{engine="{first.url}",role="both"}} 0.0',
    ):
        assert line in lines


async def test_what_is_not_cached_any_more_attracts_nothing_but_what_is_being_computed_does(
    routed, publishers
):
    first, second = fake_engines(publishers)
    http, router = await routed(engine=[first, second], tokenizer=("mini",), tokenize_timeout=PATIENCE)
    known = [router.engines.by_url[one.url] for one in (first, second)]
    await until(lambda: all(one.blocks is not None for one in known))
    for _ in range(2):  # the text that the first was sent does not count, as its events do not confirm it
        await ask(http, FOX * 8)
    assert (len(first.seen), len(second.seen)) == (1, 1)
    first.fault = "waits"
    asking = asyncio.create_task(ask(http, FOX * 8))
    await first.got_one.wait()
    await until(lambda: known[0].num_requests)
    with known[1].serving(0), known[1].serving(0):
        asking_again = asyncio.create_task(ask(http, FOX * 8 + "And?"))
        await until(lambda: known[0].num_requests == 2)
    first.may_go_on.set()
    await asyncio.gather(asking, asking_again)
    assert (len(first.seen), len(second.seen)) == (3, 1)
    assert not chunks_in_flight(known[0].in_flight)


@pytest.mark.parametrize("block_size", [-1, 0, 1 << 16])
async def test_an_engine_whose_block_size_cannot_be_is_not_followed(routed, publishers, caplog, block_size):
    first, second = fake_engines(publishers)
    first.block_size = block_size
    http, router = await routed(engine=[first, second], tokenizer=("mini",), tokenize_timeout=PATIENCE)
    known = [router.engines.by_url[one.url] for one in (first, second)]
    await until(lambda: known[1].blocks is not None)
    await ask(http, FOX)
    assert known[0].blocks is None
    assert f"its block size of {block_size} tokens is not valid" in caplog.text


async def test_an_engine_that_is_removed_is_followed_no_longer(routed, publishers):
    first, second = fake_engines(publishers)
    http, router = await routed(engine=[first, second], tokenizer=("mini",))
    known = router.engines.by_url[first.url]
    await until(lambda: known.blocks is not None)
    await http.delete("/route/engines", params={"url": first.url})
    assert known.blocks is None
    first.kv_events["port"] = 0
    second.kv_events = None
    await http.post("/route/engines", json={"url": first.url, "role": "both"})
    added = router.engines.by_url[first.url]
    await check_health(router, router.engines.by_url[second.url])
    assert router.engines.by_url[second.url].blocks is None
    first.kv_events = {**first.kv_events, "port": publishers[0].tcp_ports[0]}
    await check_health(router, added)
    await until(lambda: added.blocks is not None)

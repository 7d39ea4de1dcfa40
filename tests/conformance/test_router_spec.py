"""Routers, sidecars and trainers made for vLLM use Quire: each contract is read by its consumer's rules."""

from __future__ import annotations

import asyncio
import re

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from conformance import row

import preloaded
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.config import KVEventsConfig, KVTransferConfig, ServerConfig
from quire.server.app import create_app

LOCAL = "tcp://127.0.0.1:*"
BLOCK = 16
PATIENCE = 60.0  # seconds, for what comes at once
LONG = "The quick brown fox jumps over the lazy dog, and then again. " * 4
USER = [{"role": "user", "content": LONG}]
GREEDY = {"model": "mini", "temperature": 0, "max_tokens": 6}


def started(role: str) -> AsyncLLM:
    events = KVEventsConfig(
        kv_events_endpoint=LOCAL, kv_events_replay_endpoint=LOCAL, kv_events_topic="kv@pod@mini"
    )
    config = EngineConfig(
        num_threads=1,
        role=role,
        kv_events=events,
        kv_transfer=KVTransferConfig(kv_transfer_token="secret"),
        scheduler=SchedulerConfig(num_kv_blocks=256, block_size=BLOCK),
    )
    with preloaded.engines():
        return AsyncLLM(config)


@pytest.fixture(scope="module")
def llms():
    llms = {role: started(role) for role in ("prefill", "decode")}
    yield llms
    for llm in llms.values():
        asyncio.run(llm.shutdown())


@pytest.fixture
async def clients(llms):
    """An HTTP client for each engine, by role."""
    found = {}
    for role, llm in llms.items():
        await llm.wait_until_ready()
        transport = httpx.ASGITransport(app=create_app(llm, ServerConfig()))
        found[role] = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    yield found
    for client in found.values():
        await client.aclose()


async def answer_of(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


class Index:
    """What a router like llm-d's knows of an engine: its batches from the first on, over the replay socket.

    Blocks are known by keys of the router's own, made of parent, tokens and extra keys. The engine's numbers
    only tell which block an event means.
    """

    def __init__(self) -> None:
        self.key_of: dict[int, object] = {}
        self.expected = 0
        self.events: list[dict] = []

    async def catch_up(self, port: int) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart((b"", self.expected.to_bytes(8, "big")))
        while True:
            assert await socket.poll(PATIENCE * 1000)
            empty, topic, number, payload = await socket.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            assert topic.split(b"@") == [b"kv", b"pod", b"mini"]
            assert int.from_bytes(number, "big") == self.expected  # else a replay is not valid
            self.expected += 1
            self.apply(msgspec.msgpack.decode(payload))
        context.destroy(linger=0)

    def apply(self, batch: list) -> None:
        assert isinstance(batch[0], float)
        for event in batch[1]:
            self.events.append(event)
            match event:
                case {"type": "AllBlocksCleared"}:
                    self.key_of.clear()
                case {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}:
                    assert parent is None or parent in self.key_of  # else the event is skipped
                    self._store(event, hashes, None if parent is None else self.key_of[parent])
                case {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}:
                    for number in hashes:
                        del self.key_of[number]
                case _:
                    raise AssertionError(event)

    def _store(self, event: dict, hashes: list[int], key: object) -> None:
        size, tokens = event["block_size"], event["token_ids"]
        extra = event.get("extra_keys") or [None] * len(hashes)
        assert (len(tokens), len(extra)) == (size * len(hashes), len(hashes))
        assert (event["lora_id"], event["lora_name"], event["medium"]) == (None, None, "GPU")
        for index, number in enumerate(hashes):
            assert 0 <= number < 2**64
            own = tuple(tokens[index * size : (index + 1) * size])
            key = key, own, None if extra[index] is None else tuple(extra[index])
            self.key_of[number] = key

    def num_found(self, tokens: list[int], salt: str | None) -> int:
        """Return how many leading full blocks of a prompt the engine has."""
        key, count, known = None, 0, set(self.key_of.values())
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = key, tuple(tokens[start : start + BLOCK]), (salt,) if salt and not start else None
            if key not in known:
                break
            count += 1
        return count


@pytest.mark.parametrize("salt", [None, "tenant"])
@row(
    "events are maps with a type",
    "blocks are unsigned 64-bit numbers, chained by parents",
    "topic kv@POD@MODEL",
    "sequence numbers from 0, 8 bytes, big-endian",
    "medium, lora_id, lora_name",
    "extra_keys with the salt, and a null first parent",
    "replay in four frames, ended by -1",
    "AllBlocksCleared first",
)
async def test_a_router_finds_what_an_engine_has_cached(llms, clients, salt):
    client, salted = clients["prefill"], {} if salt is None else {"cache_salt": salt}
    ports = (await client.get("/engine")).json()["kv_events"]
    [rendered] = await answer_of(client, "/v1/completions/render", prompt=LONG, **GREEDY, **salted)
    answer = await answer_of(
        client, "/v1/completions", prompt=LONG, return_token_ids=True, **GREEDY, **salted
    )
    tokens = rendered["token_ids"]
    assert answer["choices"][0]["prompt_token_ids"] == tokens
    index = Index()
    await index.catch_up(ports["replay_port"])
    assert index.events[0] == {"type": "AllBlocksCleared"}
    assert index.num_found(tokens, salt) == len(tokens) // BLOCK
    assert index.num_found(tokens, "other") == 0
    async with asyncio.timeout(PATIENCE):
        while not await llms["prefill"].reset_prefix_cache():  # until nothing is lent any more
            await asyncio.sleep(0.01)
    await index.catch_up(ports["replay_port"])
    assert index.num_found(tokens, salt) == 0


NOWHERE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Sidecar:
    """llm-d's P/D sidecar beside a decoder, as far as it changes requests."""

    def __init__(self, clients):
        self._clients = clients
        self.sent = []

    async def post(self, path, body, headers):
        prefill = headers.get("x-prefiller-host-port")
        if prefill is None:
            return await self._clients["decode"].post(path, json=body)
        asked = {**body, "kv_transfer_params": NOWHERE, "stream": False, "max_tokens": 1}
        asked.pop("stream_options", None)
        if "max_completion_tokens" in body:
            asked["max_completion_tokens"] = 1
        request_id = {"x-request-id": f"{len(self.sent)}-of-the-sidecar"}
        first = await self._clients[prefill].post(path, json=asked, headers=request_id)
        assert first.status_code == 200, first.text
        params = first.json()["kv_transfer_params"]
        self.sent.append(params)
        body = {**body, "kv_transfer_params": params}
        return await self._clients["decode"].post(path, json=body, headers=request_id)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@row("kv_transfer_params with nulls", "x-prefiller-host-port")
async def test_prompts_computed_by_one_engine_go_on_at_another_behind_a_sidecar(clients, path, streams):
    sidecar = Sidecar(clients)
    text = f"{streams} {LONG}"  # not cached by the decoder
    prompt = {"prompt": text}
    if path == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": text}]}
    body = {**GREEDY, **prompt, "stream": streams, "return_token_ids": True}
    alone = await sidecar.post(path, {**body, "cache_salt": "other"}, {})
    before = await loaded_bytes(clients["decode"])
    divided = await sidecar.post(path, body, {"x-prefiller-host-port": "prefill"})
    assert divided.status_code == 200, divided.text
    assert generated(divided, streams) == generated(alone, streams) != []
    assert await loaded_bytes(clients["decode"]) > before
    assert sidecar.sent[0]["do_remote_prefill"] is True


def generated(response, streams):
    if not streams:
        return response.json()["choices"][0]["token_ids"]
    events = [
        line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


async def loaded_bytes(client):
    return await metric(client, "quire_kv_peer_loaded_bytes_total")


async def metric(client, name):
    [line] = [
        line for line in (await client.get("/metrics")).text.split("\n") if re.match(rf"{name}[ {{]", line)
    ]
    return float(line.rpartition(" ")[2])


@row(
    "vllm:num_requests_waiting, vllm:num_requests_running, vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)
async def test_an_endpoint_picker_reads_the_metrics(clients):
    text = (await clients["decode"].get("/metrics")).text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert re.search(rf'^vllm:{name}{{engine="0",model_name="mini"}} 0\.0$', text, re.MULTILINE), name
    labels = dict(
        re.findall(r'(\w+)="([^"]*)"', re.search(r"^vllm:cache_config_info{(.*)} 1\.0$", text, re.M)[1])
    )
    assert (labels["block_size"], labels["num_gpu_blocks"]) == (str(BLOCK), "256")
    adapters = re.search(r"^vllm:lora_requests_info{(.*)} \d", text, re.M)[1]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', adapters))
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    assert [labels[name] for name in names] == ["0", "", ""]


@row("/v1/completions/render, /v1/chat/completions/render", "/inference/v1/generate", "/get_world_size")
async def test_a_trainer_renders_once_and_samples_by_tokens(clients):
    client = clients["decode"]
    chat = await answer_of(client, "/v1/chat/completions", messages=USER, return_token_ids=True, **GREEDY)
    rendered = await answer_of(client, "/v1/chat/completions/render", messages=USER, **GREEDY)
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    sampled = await answer_of(client, "/inference/v1/generate", **rendered)
    assert sampled["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert (await client.get("/get_world_size")).json()["world_size"] == 1


@row("return_tokens_as_token_ids")
async def test_a_trainer_reads_tokens_from_logprobs(clients):
    asked = {"prompt": [5, 6, 7], "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = (await answer_of(clients["decode"], "/v1/completions", **GREEDY, **asked))["choices"]
    named = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    assert named == choice["token_ids"]

"""Tenants of a server: what one can find out about another, with the openai client and two keys."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

import preloaded
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.config import ServerConfig
from quire.server.app import create_app

TENANTS = """
[tenants.alice]
keys = ["alice-key"]
weight = 3

[tenants.bob]
keys = ["bob-key"]

[tenants.carol]
keys = ["carol-key"]
cache_group = "shared"

[tenants.dave]
keys = ["dave-key"]
cache_group = "shared"
kv_transfer = true

[tenants.root]
keys = ["root-key"]
admin = true
"""
PROMPT = "copy: " + "b c d e " * 12


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return ServerConfig(api_keys_file=str(path))


def http_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60)


class Clients:
    """An openai client for each tenant."""

    def __init__(self, http):
        self.http = http

    def __getattr__(self, name):
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=f"{name}-key", http_client=self.http, max_retries=0
        )


@pytest.fixture
async def fake(llm, config):
    async with http_of(create_app(llm, config)) as http:
        yield Clients(http)


@pytest.fixture(scope="module")
def engine():
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=256)))
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture
async def real(engine, config):
    async with http_of(create_app(engine, config)) as http:
        yield Clients(http)


async def complete(client, prompt="hold", **fields):
    return await client.completions.create(model="fake", prompt=prompt, **fields)


async def test_a_key_is_needed_and_names_the_tenant(fake, llm):
    with pytest.raises(openai.AuthenticationError):
        await complete(fake.mallory, "hello")
    await complete(fake.alice, "hello", user="bob", extra_body={"cache_salt": "x"})
    await complete(fake.bob, "hello", user="anyone")
    alice, bob = (seen.options for seen in llm.seen)
    assert (alice["tenant"], alice["tenant_weight"]) == ("alice", 3)
    assert (bob["tenant"], bob["tenant_weight"]) == ("bob", 1)


@pytest.mark.parametrize("field", ["tenant", "tenant_weight"])
async def test_a_client_cannot_say_who_it_is(fake, llm, field):
    await complete(fake.alice, "hello")
    await complete(fake.alice, "hello", extra_body={field: 1})
    plain, claiming = (seen.options for seen in llm.seen)
    assert plain == claiming


async def test_salts_differ_between_tenants_whatever_clients_send(fake, llm):
    for name in ("alice", "bob", "carol", "dave"):
        for salt in ("", "a", "alice", "tenant"):
            await complete(getattr(fake, name), "hello", extra_body={"cache_salt": salt})
    salts = [seen.options["cache_salt"] for seen in llm.seen]
    assert len(set(salts)) == 12
    assert salts[8:12] == salts[12:]


async def test_a_tenant_sees_its_own_requests_only(fake, llm):
    calls = []
    for name in ("alice", "bob"):
        headers = {"X-Request-Id": "same"}
        calls.append(asyncio.create_task(complete(getattr(fake, name), extra_headers=headers)))
    while len(llm.live) < 2:
        await asyncio.sleep(0)

    async def listed(name):
        answer = await fake.http.get("/v1/requests", headers={"x-api-key": f"{name}-key"})
        return [call["id"] for call in answer.json()["data"]]

    async def status(name, call_id):
        url = f"/v1/requests/{call_id}"
        return (await fake.http.get(url, headers={"x-api-key": f"{name}-key"})).status_code

    assert await listed("alice") == await listed("bob") == ["cmpl-same"]
    assert await listed("carol") == []
    assert sorted(await listed("root")) == ["alice:cmpl-same", "bob:cmpl-same"]
    assert await status("alice", "cmpl-same") == 200
    for other in ("bob:cmpl-same", "alice:cmpl-same", "bob:cmpl-same/0"):
        assert await status("alice", other) == 404
    assert await status("carol", "cmpl-same") == 404
    assert await status("root", "bob:cmpl-same") == 200
    for name, path, expected in (
        ("carol", "/v1/requests/cmpl-same", 404),
        ("alice", "/v1/requests/bob:cmpl-same", 404),
    ):
        answer = await fake.http.delete(path, headers={"x-api-key": f"{name}-key"})
        assert answer.status_code == expected
    for name, expected in (("alice", 403), ("root", 409)):
        answer = await fake.http.post("/reset_prefix_cache", headers={"x-api-key": f"{name}-key"})
        assert answer.status_code == expected
    for name, expected in (("alice", "admin"), ("root", "--engine-control")):
        answer = await fake.http.post("/pause", headers={"x-api-key": f"{name}-key"})
        assert expected in answer.json()["error"]["message"]
    assert len(llm.live) == 2
    metrics = (await fake.http.get("/metrics")).text
    assert "same" not in metrics
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    assert [call_id for call_id in llm.aborted if call_id is not None] == ["alice:cmpl-same/0"]
    assert await listed("bob") == ["cmpl-same"]
    llm.abort("bob:cmpl-same/0")
    with pytest.raises(openai.InternalServerError, match="aborted"):
        await calls[1]


async def test_kv_transfer_params_need_a_right(fake, llm):
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(openai.PermissionDeniedError, match="kv_transfer"):
        await complete(fake.alice, "hello", extra_body=params)
    assert not llm.seen
    await complete(fake.dave, "hello", extra_body=params)
    statuses = [
        (await fake.http.delete("/v1/kv_transfers/t", headers={"x-api-key": f"{name}-key"})).status_code
        for name in ("alice", "dave")
    ]
    assert statuses == [403, 200]
    assert llm.released == ["t"]


async def test_cached_tokens_tell_of_ones_own_only(real):
    async def cached(client, **extra):
        answer = await client.completions.create(
            model="mini", prompt=PROMPT, max_tokens=1, extra_body=extra or None
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached(real.alice) == 0
    own = await cached(real.alice)
    assert own >= 16
    assert await cached(real.bob) == 0
    assert await cached(real.bob) == own
    assert await cached(real.bob, cache_salt="a") == 0
    assert await cached(real.bob, cache_salt="a") == own
    assert await cached(real.carol) == 0
    assert await cached(real.dave) == own


async def test_tenants_get_the_same_tokens(real):
    answers = [
        (await client.completions.create(model="mini", prompt=PROMPT, max_tokens=20, temperature=0))
        .choices[0]
        .text
        for client in (real.alice, real.bob, real.alice)
    ]
    assert len(set(answers)) == 1

"""Counts of requests over HTTP, and the figures of tenants: what they count, and who gets to see them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_llm import REPLY
from prometheus_client.parser import text_string_to_metric_families

from quire.config import EdgeConfig, ServerConfig
from quire.server.app import create_app

TENANTS = """
[tenants.alice]
keys = ["alice-key"]
requests_per_minute = 3

[tenants.bob]
keys = ["bob-key"]
max_running_seqs = 1

[tenants.root]
keys = ["root-key"]
admin = true
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return ServerConfig(api_keys_file=str(path), edge=EdgeConfig(cors_origins=("https://page.example",)))


@pytest.fixture
async def tenants_http(llm, config):
    transport = httpx.ASGITransport(app=create_app(llm, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def key(name):
    return {"Authorization": f"Bearer {name}-key"}


async def samples(http, prefix, headers=None):
    response = await http.get("/metrics", headers=headers)
    return {
        (sample.name.removeprefix(prefix), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


async def counts(http):
    """Return the number of requests by route, method and status; labels are in alphabetical order."""
    found = await samples(http, "quire_http_requests_total")
    return {(route, method, int(status)): number for (_, method, route, status), number in found.items()}


async def test_requests_count_by_route_method_and_status(http):
    body = {"model": "fake", "prompt": "Hi", "max_tokens": 2}
    for path in ("/v1/completions", "/completions/"):
        await http.post(path, json=body)
    await http.post("/v1/completions", json={**body, "stream": True})
    await http.post("/v1/completions", json={**body, "model": "another"})
    await http.post("/v1/completions", json={**body, "prompt": "queue"})
    await http.get("/v1/requests/cmpl-nobody")
    await http.get("/v1/requests/some/other/id")
    await http.get("/docs")
    await http.head("/health")
    await http.get("/v1/completions")
    assert await counts(http) == {
        ("/v1/completions", "POST", 200): 3,
        ("/v1/completions", "POST", 404): 1,
        ("/v1/completions", "POST", 429): 1,
        ("/v1/requests/{request_id}", "GET", 404): 2,
        ("/docs", "GET", 200): 1,
        ("/health", "HEAD", 200): 1,
        ("/v1/completions", "GET", 405): 1,
    }
    assert (await counts(http))["/metrics", "GET", 200] == 1


async def test_whatever_clients_make_up_adds_no_label_values(http):
    for number in range(20):
        await http.get(f"/no/such/{number}")
        await http.request(f"VERB{number}", "/v1/models")
    assert await counts(http) == {("other", "GET", 404): 20, ("/v1/models", "other", 405): 20}


async def test_what_is_refused_before_it_is_routed_counts_for_its_route(tenants_http):
    http = tenants_http
    await http.post("/v1/completions", json={})
    await http.get("/v1/models/x", headers={"X-Request-Id": "a b"})
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    await http.options("/v1/messages", headers=preflight)
    assert await counts(http) == {
        ("/v1/completions", "POST", 401): 1,
        ("/v1/models/{model}", "GET", 400): 1,
        ("/v1/messages", "OPTIONS", 200): 1,
    }


async def test_a_client_that_leaves_before_its_answer_counts_as_499(live, llm):
    async with httpx.AsyncClient(base_url=live) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={"model": "fake", "prompt": "hold"}))
        assert await asyncio.to_thread(llm.held_seen.wait, 60)
        asking.cancel()
        assert await asyncio.to_thread(llm.abort_seen.wait, 60)
        while not (found := await counts(http)):
            await asyncio.sleep(0)
        assert found["/v1/completions", "POST", 499] == 1


async def test_figures_of_tenants(tenants_http):
    http = tenants_http
    body = {"model": "fake", "prompt": ["Hi", "Hello"], "max_tokens": 5}
    assert (await http.post("/v1/completions", json=body, headers=key("alice"))).status_code == 200
    assert (await http.post("/v1/completions", json=body, headers=key("alice"))).status_code == 429
    assert (
        await http.post("/v1/completions", json={**body, "n": 9}, headers=key("alice"))
    ).status_code == 400
    chat = {"model": "fake", "messages": [{"role": "user", "content": "Hey"}], "max_tokens": 100}
    assert (await http.post("/v1/chat/completions", json=chat, headers=key("bob"))).status_code == 200
    assert (await http.post("/v1/completions", json={**body, "n": 2}, headers=key("bob"))).status_code == 400
    found = await samples(http, "quire_tenant_", key("root"))
    by_tenant = {
        tenant: {name: value for (name, *labels), value in found.items() if labels == [tenant]}
        for tenant in ("alice", "bob", "root")
    }
    assert by_tenant["alice"] == {
        "requests_total": 2,
        "prompt_tokens_total": 3 + 6,
        "generation_tokens_total": 10,
        "requests_waiting": 0,
        "requests_running": 0,
    }
    assert by_tenant["bob"]["generation_tokens_total"] == len(REPLY)
    assert set(by_tenant["root"].values()) == {0}
    refusals = {
        tuple(rest): value for (name, *rest), value in found.items() if name == "refusals_total" and value
    }
    assert refusals == {("requests_per_minute", "alice"): 2, ("max_running_seqs", "bob"): 1}


async def test_requests_of_a_tenant_wait_and_then_run(tenants_http, llm):
    http = tenants_http
    body = {"model": "fake", "prompt": "hold", "max_tokens": 9}
    asking = [
        asyncio.create_task(
            http.post("/v1/completions", json=body, headers={**key("bob"), "X-Request-Id": name})
        )
        for name in ("one", "two")
    ]
    await llm.held.wait()
    found = await samples(http, "quire_tenant_requests_", key("root"))
    assert (found["running", "bob"], found["waiting", "bob"]) == (1, 1)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    found = await samples(http, "quire_tenant_requests_", key("root"))
    assert (found["running", "bob"], found["waiting", "bob"]) == (0, 0)


@pytest.mark.parametrize("headers", [{}, key("alice"), key("wrong"), {"Authorization": "Basic eA=="}])
async def test_only_an_admin_sees_figures_of_tenants(tenants_http, headers):
    response = await tenants_http.get("/metrics", headers=headers)
    assert response.status_code == 200
    assert "quire_engine_up" in response.text
    assert "tenant" not in response.text
    assert "alice" not in response.text


async def test_a_tenant_that_is_gone_has_no_figures(llm, config, tmp_path):
    app = create_app(llm, config)
    (tmp_path / "keys.toml").write_text(TENANTS.replace("[tenants.bob]", "[tenants.eve]"))
    await app.state.context.tenants.reload(is_forced=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        found = await samples(http, "quire_tenant_requests_total", key("root"))
    assert {name for _, name in found} == {"alice", "eve", "root"}


async def test_without_a_key_file_there_are_no_tenants_to_show(http):
    assert "quire_tenant" not in (await http.get("/metrics")).text

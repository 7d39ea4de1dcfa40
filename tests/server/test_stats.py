"""/stats: the figures that the page shows, against the metrics that say the same."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.monitoring.stats import MAX_LISTED_TENANTS

KEYS = """
[tenants.alice]
keys = ["alice-key"]
requests_per_minute = 10

[tenants.bob]
keys = ["bob-key"]
tokens_per_minute = 1000

[tenants.root]
keys = ["root-key"]
admin = true
"""


@pytest.fixture
async def keyed(llm, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    app = create_app(llm, ServerConfig(api_keys_file=str(path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        yield http, app


async def stats_of(http, key=""):
    answer = await http.get("/stats", headers={"x-api-key": key})
    assert answer.status_code == 200
    return answer.json()


async def test_figures_are_those_of_the_metrics(http, client):
    await client.completions.create(model="fake", prompt="Hello", max_tokens=5)
    stats = await stats_of(http)
    assert stats["model"] == "fake"
    assert stats["engine_up"]
    assert stats["requests"] == {"running": 0, "waiting": 2, "awaiting": 1, "preempted": 1}
    assert stats["kv_blocks"] == {"total": 64, "free": 48, "idle": 32, "leased": 5, "evicted": 6}
    assert stats["tokens"] == {"prompt": 6, "generated": 5, "looked_up": 100, "cached": 40}
    assert stats["tenants"] == []


@pytest.mark.parametrize("name", ["time_to_first_token", "inter_token_latency"])
async def test_histograms_are_those_of_the_metrics(http, client, name):
    await client.completions.create(model="fake", prompt="Hello", max_tokens=5)
    histogram = (await stats_of(http))[name]
    text = (await http.get("/metrics")).text
    [family] = [one for one in text_string_to_metric_families(text) if one.name == f"quire_{name}_seconds"]
    below = {float(one.labels["le"]): one.value for one in family.samples if one.name.endswith("_bucket")}
    assert histogram["bounds"] == list(below)[:-1]
    assert [sum(histogram["counts"][: number + 1]) for number in range(len(below))] == list(below.values())
    assert sum(histogram["counts"]) > 0


async def test_rates_have_a_clock_that_goes_forward(http):
    first, second = await stats_of(http), await stats_of(http)
    assert second["time"] > first["time"]


async def test_a_tenant_sees_itself_alone(keyed):
    http, app = keyed
    with app.state.context.calls.serving("bob:cmpl-1", ["x"]):
        alice = {"name": "alice", "calls": 0, "requests_left": 10, "tokens_left": None}
        bob = {"name": "bob", "calls": 1, "requests_left": None, "tokens_left": 1000}
        assert (await stats_of(http, "alice-key"))["tenants"] == [alice]
        assert (await stats_of(http, "bob-key"))["tenants"] == [bob]
        for_admin = (await stats_of(http, "root-key"))["tenants"]
    assert for_admin[0] == bob, "the busiest comes first"
    assert [one["name"] for one in for_admin[1:]] == ["alice", "root"]


async def test_only_so_many_tenants_are_listed(llm, tmp_path):
    path = tmp_path / "keys.toml"
    tenants = [f'[tenants.t{number}]\nkeys = ["key-{number}"]\nadmin = true\n' for number in range(150)]
    path.write_text("\n".join(tenants))
    path.chmod(0o600)
    app = create_app(llm, ServerConfig(api_keys_file=str(path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        with app.state.context.calls.serving("t140:cmpl-1", ["x"]):
            listed = (await stats_of(http, "key-0"))["tenants"]
    assert len(listed) == MAX_LISTED_TENANTS
    assert listed[0]["name"] == "t140"


async def test_a_dead_engine_has_figures_too(http, llm):
    llm.dead = "the engine process ended with signal 9"
    stats = await stats_of(http)
    assert not stats["engine_up"]
    assert stats["requests"]["running"] == 0

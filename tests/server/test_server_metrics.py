"""/metrics against the official parser, and the small endpoints."""

import asyncio
import importlib.metadata

import httpx
from fake_llm import REPLY
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServerConfig
from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
from quire.server.app import create_app
from quire.server.calls.outputs import SequenceProgress
from quire.server.metrics.registry import NAMES
from quire.step import GraphStats

MESSAGES = [{"role": "user", "content": "Hey"}]


async def samples(http):
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_engine_figures(http):
    values = await samples(http)
    assert values["quire_engine_up",] == 1
    assert values["quire_requests_running",] == 0
    assert values["quire_requests_waiting",] == 2
    assert values["quire_kv_cache_usage_ratio",] == 0.25
    assert values["quire_kv_blocks",] == 64
    assert values["quire_kv_blocks_free",] == 48
    assert values["quire_engine_steps_total",] == 7
    assert values["quire_preemptions_total",] == 1
    assert values["quire_prefix_cache_queried_tokens_total",] == 100
    assert values["quire_prefix_cache_hit_tokens_total",] == 40
    assert values["quire_requests_awaiting",] == 1
    assert values["quire_kv_blocks_leased",] == 5
    assert values["quire_kv_blocks_idle",] == 32
    assert values["quire_prefix_cache_evicted_blocks_total",] == 6
    assert values["quire_draft_tokens_total",] == 20
    assert values["quire_accepted_draft_tokens_total",] == 9
    assert values["quire_timeouts_total",] == 3
    assert values["quire_loaded_kv_tokens_total",] == 64
    assert values["quire_failed_kv_loads_total",] == 2


async def test_figures_under_vllms_names(http, client):
    await client.completions.create(model="fake", prompt="Hi", max_tokens=3)
    families = {
        family.name: family for family in text_string_to_metric_families((await http.get("/metrics")).text)
    }
    for ours, theirs in ((ours, theirs) for ours, names in NAMES.items() for theirs in names):
        own, other = families[ours], families[theirs]
        assert other.type == own.type
        expected = {
            (sample.name.replace(ours, theirs), tuple(sample.labels.values())): sample.value
            for sample in own.samples
            if "refused" not in sample.labels.values()
        }
        added = [(one.labels.pop("model_name"), one.labels.pop("engine")) for one in other.samples]
        assert set(added) == {("fake", "0")}
        assert {(one.name, tuple(one.labels.values())): one.value for one in other.samples} == expected
    assert families["vllm:request_success"].samples[0].labels.keys() >= {"finished_reason"}


async def test_figures_of_the_kv_tier(http, llm):
    assert not [name for name, *_ in await samples(http) if name.startswith("quire_kv_tier")]
    numbers = dict(zip(KVConnectorStats.__struct_fields__, range(100, 200), strict=False))
    llm.connector_stats = KVConnectorStats(**numbers)
    values = await samples(http)
    assert {name: value for (name, *_), value in values.items() if name.startswith("quire_kv_tier")} == {
        "quire_kv_tier_capacity_bytes": numbers["capacity_bytes"],
        "quire_kv_tier_stored_blocks": numbers["num_stored_blocks"],
        "quire_kv_tier_stored_bytes": numbers["stored_bytes"],
        "quire_kv_tier_loaded_blocks_total": numbers["num_loaded_blocks"],
        "quire_kv_tier_memory_hits_total": numbers["num_memory_hits"],
        "quire_kv_tier_failed_reads_total": numbers["num_failed_reads"],
        "quire_kv_tier_written_blocks_total": numbers["num_written_blocks"],
        "quire_kv_tier_failed_writes_total": numbers["num_failed_writes"],
        "quire_kv_tier_dropped_writes_total": numbers["num_dropped_writes"],
        "quire_kv_tier_evicted_blocks_total": numbers["num_evicted_blocks"],
        "quire_kv_tier_loads_chosen_total": numbers["num_loads_chosen"],
        "quire_kv_tier_computations_chosen_total": numbers["num_computations_chosen"],
        "quire_kv_tier_load_seconds_per_block": numbers["load_seconds_per_block"],
        "quire_kv_tier_compute_seconds_per_token": numbers["compute_seconds_per_token"],
    }


async def test_figures_of_graphs(http, llm):
    assert not [name for name, *_ in await samples(http) if name.startswith("quire_gpu")]
    llm.graphs = GraphStats(num_graphs=3, num_replayed=50, num_launched=7, num_failures=2)
    values = await samples(http)
    assert {key: value for key, value in values.items() if key[0].startswith("quire_gpu")} == {
        ("quire_gpu_graphs",): 3,
        ("quire_gpu_graph_failures_total",): 2,
        ("quire_gpu_steps_total", "replayed"): 50,
        ("quire_gpu_steps_total", "launched"): 7,
    }


async def test_figures_of_a_split(http, llm):
    numbers = dict(zip(KVPeerStats.__struct_fields__[:-1], range(100, 200), strict=False))
    llm.connector_stats = KVPeerStats(**numbers, num_peers_by_transport={"tcp": 2, "shared_memory": 1})
    values = await samples(http)
    assert not [name for name, *_ in values if name.startswith("quire_kv_tier")]
    assert {key: value for key, value in values.items() if key[0].startswith("quire_kv_peer")} == {
        ("quire_kv_peer_lent_prompts_total",): numbers["num_lent_prompts"],
        ("quire_kv_peer_loads_chosen_total",): numbers["num_loads_chosen"],
        ("quire_kv_peer_computations_chosen_total",): numbers["num_computations_chosen"],
        ("quire_kv_peer_missing_prompts_total",): numbers["num_missing_prompts"],
        ("quire_kv_peer_prefix_lookups_total",): numbers["num_prefix_lookups"],
        ("quire_kv_peer_prefixes_found_total",): numbers["num_prefixes_found"],
        ("quire_kv_peer_failed_loads_total",): numbers["num_failed_loads"],
        ("quire_kv_peer_loaded_blocks_total",): numbers["num_loaded_blocks"],
        ("quire_kv_peer_loaded_bytes_total",): numbers["loaded_bytes"],
        ("quire_kv_peer_load_seconds_per_block",): numbers["load_seconds_per_block"],
        ("quire_kv_peer_compute_seconds_per_token",): numbers["compute_seconds_per_token"],
        ("quire_kv_peers", "tcp"): 2,
        ("quire_kv_peers", "shared_memory"): 1,
    }


async def test_request_figures(client, http):
    await client.completions.create(model="fake", prompt="Hi", max_tokens=5, n=2)
    await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hey"}])
    values = await samples(http)
    assert values["quire_prompt_tokens_total",] == 3 + 4
    assert values["quire_generation_tokens_total",] == 10 + len(REPLY)
    assert values["quire_requests_finished_total", "length"] == 2
    assert values["quire_requests_finished_total", "stop"] == 1
    assert values["quire_requests_finished_total", "abort"] == 0
    assert values["quire_time_to_first_token_seconds_count",] == 2
    assert values["quire_request_duration_seconds_count",] == 2
    assert values["quire_inter_token_latency_seconds_count",] == 2 * 4 + len(REPLY) - 1
    assert values["vllm:request_generation_tokens_sum", "0", "fake"] == 10 + len(REPLY)


async def test_failures_count_by_reason(http):
    for prompt in ("", "queue", ["Hi", ""], "fail", "die"):
        await http.post("/v1/completions", json={"model": "fake", "prompt": prompt, "n": 2})
    values = await samples(http)
    assert values["quire_requests_finished_total", "refused"] == 2 + 2 + 4
    assert values["quire_requests_finished_total", "error"] == 2 + 2
    assert values["quire_requests_finished_total", "abort"] == 0


STREAMS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": MESSAGES},
}


async def test_an_output_that_cannot_be_passed_on_counts_as_an_error(http, tmp_path, llm, monkeypatch):
    def fail(self, completion):
        raise RuntimeError("a defect")

    monkeypatch.setattr(SequenceProgress, "advance", fail)
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.limited]\nkeys = ["key"]\ntokens_per_minute = 100_000\n')
    limiting = httpx.ASGITransport(app=create_app(llm, ServerConfig(api_keys_file=str(keys))))
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=limiting, base_url="http://localhost", headers=headers) as limited:
        for client in (http, limited):
            for path, fields in STREAMS.items():
                response = await client.post(path, json={"model": "fake", "stream": True, **fields})
                assert response.status_code == 500, path
            values = await samples(client)
            assert values["quire_requests_finished_total", "error"] == len(STREAMS)
            assert values["quire_requests_finished_total", "abort"] == 0


async def test_a_client_that_leaves_counts_as_an_abort(live, llm):
    async with httpx.AsyncClient(base_url=live) as http:
        body = {"model": "fake", "prompt": "hold", "stream": True, "n": 3}
        async with http.stream("POST", "/v1/completions", json=body):
            assert await asyncio.to_thread(llm.held_seen.wait, 60)
        assert await asyncio.to_thread(llm.abort_seen.wait, 60)
        assert (await samples(http))["quire_requests_finished_total", "abort"] == 3


async def test_an_engine_that_does_not_answer_keeps_the_last_figures(http, llm):
    await samples(http)
    llm.dead = "gone"
    values = await samples(http)
    assert values["quire_engine_up",] == 0
    assert values["quire_engine_steps_total",] == 7


async def test_models(client, http):
    models = await client.models.list()
    [model] = models.data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "quire")
    assert (await client.models.retrieve("fake")).id == "fake"
    card = (await http.get("/v1/models")).json()["data"][0]
    assert (card["max_model_len"], card["task"]) == (256, "generate")


async def test_version(http):
    assert (await http.get("/version")).json() == {"version": importlib.metadata.version("quire")}


async def test_a_router_can_ask_what_the_engine_is(http, llm):
    described = {"role": "prefill", "model": "fake", "block_size": 16, "max_model_len": 256}
    described["models"] = (await http.get("/v1/models")).json()["data"]
    address = {"host": "10.0.0.1", "port": 7000}
    assert (await http.get("/engine")).json() == {**described, "kv_transfer": address, "kv_events": None}
    llm.info.kv_transfer_address, llm.info.kv_events_ports = None, (7001, 7002)
    source = {"port": 7001, "replay_port": 7002, "tokenizer": llm.tokenizer.fingerprint}
    source["prompts"] = llm.tokenizer.digest
    assert (await http.get("/engine")).json() == {**described, "kv_transfer": None, "kv_events": source}

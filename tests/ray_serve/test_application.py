"""The application that options by name make, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import BatchConfig, EngineConfig, RouterConfig, ServerConfig
from quire.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")

from quire.ray import app, build_app


def deployments(**options: Any) -> dict[str, Any]:
    """The deployments of an application by name."""
    found = {}
    waiting = [build_app(**options)]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        found[deployment.name] = deployment
        if deployment.name == "Ingress":
            waiting += deployment.init_args[1]
    return found


def test_one_engine_behind_an_ingress() -> None:
    found = deployments(model="mini", max_num_seqs=8, max_num_queued_reqs=32, drain_timeout=20)
    engine, ingress = found["Engine"], found["Ingress"]
    config, server = engine.init_args
    assert isinstance(config, EngineConfig)
    assert isinstance(server, ServerConfig)
    assert (config.model, config.role, config.num_threads) == ("mini", "both", 1)
    assert config.supervision.standby_engine
    assert (engine.num_replicas, engine.max_ongoing_requests) == (1, 40)
    assert engine.ray_actor_options["num_cpus"] == 1
    assert engine._deployment_config.graceful_shutdown_timeout_s == 30
    router, [_], port = ingress.init_args
    assert isinstance(router, RouterConfig)
    assert (router.tokenizer, port) == (("mini",), 0)
    assert ingress.init_kwargs == {"models": ["mini"]}
    assert ingress.max_ongoing_requests == router.max_in_flight


def test_prefill_and_decode_are_deployments_of_their_own() -> None:
    found = deployments(prefill_replicas="1", decode_replicas="3")
    assert found.keys() == {"Ingress", "Prefill", "Decode"}
    assert [found[name].num_replicas for name in ("Prefill", "Decode")] == [1, 3]
    assert [found[name].init_args[0].role for name in ("Prefill", "Decode")] == ["prefill", "decode"]


def test_deployments_have_directories_of_their_own() -> None:
    found = deployments(prefill_replicas=1, decode_replicas=1, batch_dir="/batches", max_file_bytes=9)
    batches = {name: found[name].init_args[1].batches for name in ("Prefill", "Decode")}
    assert batches == {
        "Prefill": BatchConfig(),
        "Decode": BatchConfig(batch_dir="/batches/Decode", max_file_bytes=9),
    }
    assert found["Decode"]._deployment_config.max_surge_percent == 0  # a new replica gets its directory


def test_each_rank_has_a_bundle_at_one_machine() -> None:
    config = deployments(tensor_parallel_size=2, device="cuda", replica_cpus=3)["Engine"]._replica_config
    assert config.placement_group_bundles == [{"CPU": 1.5, "GPU": 1}] * 2
    assert config.placement_group_strategy == "STRICT_PACK"
    assert (config.ray_actor_options["num_cpus"], config.ray_actor_options["num_gpus"]) == (1.5, 1)
    config = deployments(tensor_parallel_size=4, device="cpu")["Engine"]._replica_config
    assert config.placement_group_bundles == [{"CPU": 1}] * 4
    assert deployments(device="cuda")["Engine"]._replica_config.placement_group_bundles is None


def test_an_engine_is_scaled_by_its_load() -> None:
    config = deployments(num_replicas=2, max_replicas=5)["Engine"]._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert type(config.policy.get_policy()).__name__ == "type"


def test_engines_ask_the_ingress_for_the_key_of_clients() -> None:
    found = deployments(api_key="one two", allowed_hosts=["example.com"])
    router, server = found["Ingress"].init_args[0], found["Engine"].init_args[1]
    assert (router.api_key, router.engine_api_key, server.api_key) == ("one two", "one", "one two")
    assert router.edge.allowed_hosts == ("example.com",)
    assert server.edge.allowed_hosts == ()  # the ingress calls it by its address


def test_engines_know_the_tenants() -> None:
    router = deployments(api_key="admin", api_keys_file="keys.toml")["Ingress"].init_args[0]
    assert (router.api_key, router.pass_client_keys, router.engine_api_key) == ("", True, "admin")


def test_without_an_ingress_clients_reach_engines() -> None:
    [engine] = deployments(ingress_replicas=0, allowed_hosts=["example.com"]).values()
    assert engine.init_args[1].edge.allowed_hosts == ("example.com",)


def test_several_models_share_an_ingress() -> None:
    models = [
        {"model": "mini", "num-replicas": 2, "max_num_seqs": 8},
        {"model": "a/b.c", "tokenizer": "mini", "served_model_name": ["d/e.f", "g"], "device": "cuda"},
        {"model": "h", "prefill_replicas": 1, "decode_replicas": 2, "num_replicas": 1},
    ]
    found = deployments(models=models, num_replicas=3, max_num_seqs=4, api_key="one", max_in_flight=9)
    ingress = found.pop("Ingress")
    router = ingress.init_args[0]
    assert router.tokenizer == ("mini", "h")
    assert (router.max_in_flight, router.engine_api_key) == (9, "one")
    assert ingress.init_kwargs == {"models": ["mini", "d/e.f", "g", "h"]}
    assert {name: one.num_replicas for name, one in found.items()} == {
        "Engine:mini": 2,
        "Engine:d--e_f": 3,
        "Prefill:h": 1,
        "Decode:h": 2,
    }
    configs = {name: one.init_args for name, one in found.items()}
    sequences = {name: engine.scheduler.max_num_seqs for name, (engine, _) in configs.items()}
    assert sequences == {"Engine:mini": 8, "Engine:d--e_f": 4, "Prefill:h": 4, "Decode:h": 4}
    assert {server.api_key for _, server in configs.values()} == {"one"}
    for name, one in found.items():
        assert one._deployment_config.request_router_config.request_router_kwargs == {"name": name}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_sise": "4"}, "no option has the name 'cache_sise'; did you mean 'cache_size'"),
        (
            {"port": "80"},
            "the option port cannot be set on Ray Serve: clients connect to Ray Serve's proxies",
        ),
        ({"kv-events-endpoint": "x"}, "the option kv-events-endpoint cannot be set on Ray Serve"),
        ({"prefill_replicas": 1}, "give both or neither"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "num_replicas": 2}, "leave them out"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "ingress_replicas": 0}, "need an ingress"),
        ({"ingress_replicas": 0, "ingress_port": 8001}, "none listens there"),
        ({"num_replicas": 3, "max_replicas": 2}, "below num_replicas 3"),
        ({"batch_dir": "batches"}, "it must be absolute"),
        ({"batch_dir": "/batches", "ingress_replicas": 0}, "needs an ingress"),
        ({"batch_dir": "/batches", "max_replicas": 2}, "leave one of them out"),
        ({"models": []}, "models is []; it must be a list with a mapping of options for each model"),
        ({"models": "mini"}, "models is 'mini'; it must be a list"),
        ({"models": ["mini"]}, "models is ['mini']; it must be a list"),
        ({"models": [{}, {}]}, "two models have the name 'mini'"),
        ({"models": [{"served_model_name": ["a", "b:latest"]}, {"model": "b"}]}, "the name 'b'"),
        ({"models": [{"api-key": "x"}]}, "api-key of a model is one of all models; set it beside models"),
        ({"models": [{"ingress_replicas": 2}]}, "ingress_replicas of a model is one of all models"),
        ({"models": [{"role": "prefill"}]}, "the option role cannot be set on Ray Serve"),
        ({"models": [{"models": []}]}, "no option has the name 'models'"),
        ({"models": [{}, {"model": "b"}], "ingress_replicas": 0}, "several models need an ingress"),
        ({"models": [{}, {"model": "b"}], "api_keys_file": "k"}, "the ingress needs an admin's key"),
        ({"models": [{1: 2}]}, "models is [{1: 2}]; it must be a list"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        app(given)
    assert message in str(refusal.value)

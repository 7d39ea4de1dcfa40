"""The application on Ray Serve: deployments of engines and of the ingress, from options by name."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from quire.cli.options import config_fields, configs_of
from quire.config import (
    BatchConfig,
    EdgeConfig,
    EngineConfig,
    EngineRole,
    RayConfig,
    RouterConfig,
    ServerConfig,
)
from quire.errors import ConfigError
from quire.ray.ingress import QuireIngress
from quire.ray.replica import QuireServer
from quire.server.wire.answers import LATEST

HEALTH_CHECK_PERIOD = 5.0
"""Seconds between Ray's health checks of a replica."""

HEALTH_CHECK_TIMEOUT = 30.0
"""Seconds for a replica to answer Ray's health check; the front answers while the engine computes."""

END_TIMEOUT = 10.0
"""Seconds, after `drain_timeout`, for a replica to end before Ray kills it."""

_NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "uds_access"), "clients connect to Ray Serve's proxies"),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), "Ray Serve's proxies speak TLS"),
    **dict.fromkeys(("prefill", "decode", "engine"), "the ingress learns from Ray which engines there are"),
    **dict.fromkeys(("kv_events_endpoint", "kv_events_replay_endpoint"), "each replica has ports of its own"),
    **dict.fromkeys(("kv_transfer_host", "kv_transfer_port"), "each replica has a port of its own"),
    "kv_events_data_parallel_rank": "each replica has ports of its own",
    "role": "prefill_replicas and decode_replicas give replicas their roles",
    "root_path": "Ray Serve's route_prefix takes its place",
    "monitoring_port": "Ray Serve checks the health of replicas itself",
    "access_log": "Ray Serve logs requests itself",
    "engine_api_key": "engines ask for api_key",
    "pass_client_keys": "api_keys_file decides it",
}
"""Options of `quire serve` and `quire route` that have no meaning on Ray Serve, and why."""

_OF_INGRESS = {
    *(field.name for _, field, _ in config_fields(RouterConfig)),
    *("api_keys_file", "ingress_port", "ingress_replicas"),
} - {"tokenizer"}
"""Options that all models of an application share."""


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application that Ray Serve runs: `serve run quire.ray:app model=mini num_replicas=4`.

    Args:
        args: options by name, with hyphens or underscores: those of `EngineConfig`, `ServerConfig`,
            `RouterConfig` and `RayConfig`. Values are as YAML has them, or their text. For several models,
            `models` is a list of mappings, each with what is special about one.

    Raises:
        ConfigError: an option is unknown, has no meaning on Ray Serve, or has an invalid value.
    """
    shared = {name: value for name, value in args.items() if name != "models"}
    configs = [_configs(shared, own) for own in _models(args)]
    engine, server, router, ray = configs[0]
    if len(configs) > 1:
        _check_shared(server, ray)
    if not ray.ingress_replicas:
        return _engines(engine, server, ray, "Engine", num_replicas=ray.num_replicas)
    names = _names(configs)
    engines: list[serve.Application] = []
    for (engine, server, _, ray), (name, *_) in zip(configs, names, strict=True):
        suffix = f":{_slug(name)}" if len(configs) > 1 else ""
        engines += _engines_of_roles(engine, server, ray, suffix)
    models = [name for names_of_one in names for name in names_of_one]
    return _ingress(_router_config(router, [one[0] for one in configs], server), ray, engines, models)


def _models(args: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what is special about each model; of a single one, nothing."""
    models = args.get("models", [{}])
    if not isinstance(models, Sequence) or not models or not all(map(_has_names, models)):
        raise ConfigError(
            f"models is {models!r:.80}; it must be a list with a mapping of options for each model, such as "
            '[{"model": "mini"}, {"model": "Qwen/Qwen3-0.6B"}]'
        )
    for name in (name for own in models for name in own):
        if name.replace("-", "_") in _OF_INGRESS:
            raise ConfigError(f"the option {name} of a model is one of all models; set it beside models")
    return models


def _has_names(model: Any) -> bool:
    return isinstance(model, Mapping) and all(isinstance(name, str) for name in model)


def _check_shared(server: ServerConfig, ray: RayConfig) -> None:
    """Raise `ConfigError` if an ingress cannot tell several models apart."""
    if not ray.ingress_replicas:
        raise ConfigError(
            "RayConfig.ingress_replicas is 0, but several models need an ingress, which reads which one a "
            "request names; set it to 1 or more"
        )
    if server.api_keys_file and not server.api_key:
        raise ConfigError(
            "ServerConfig.api_key is empty, but with an api_keys_file, the ingress needs an admin's key to "
            "ask engines for their models; set it"
        )


def _configs(shared: Mapping[str, Any], own: Mapping[str, Any]) -> list[Any]:
    """Return the configurations of one model, from the options of all and its own."""
    replaced = {name.replace("-", "_") for name in own}
    given = {name: value for name, value in shared.items() if name.replace("-", "_") not in replaced}
    given |= own
    refuse_meaningless(given)
    classes = (EngineConfig, ServerConfig, RouterConfig, RayConfig)
    configs = configs_of(given, *classes, defaults={"standby_engine": True})
    _, server, _, ray = configs
    if server.batches.batch_dir:
        _check_batch_dir(server.batches.batch_dir, ray)
    return configs


def refuse_meaningless(names: Iterable[str]) -> None:
    """Raise `ConfigError` for names of options that have no meaning on Ray Serve."""
    for name in names:
        if (reason := _NOT_HERE.get(name.replace("-", "_"))) is not None:
            raise ConfigError(f"the option {name} cannot be set on Ray Serve: {reason}; leave it out")


def _names(configs: Sequence[Sequence[Any]]) -> list[tuple[str, ...]]:
    """Return the names of each model, which differ."""
    names: list[tuple[str, ...]] = []
    known: set[str] = set()
    for engine, server, *_ in configs:
        names.append(tuple(dict.fromkeys(server.served_model_name)) or (engine.model,))
        for name in names[-1]:
            if _slug(name) in known:
                raise ConfigError(f"two models have the name {name!r}; give one another served_model_name")
        known.update(map(_slug, names[-1]))
    return names


def _slug(name: str) -> str:
    """Return a model's name as Ray Serve has it in names of deployments."""
    return name.removesuffix(LATEST).replace("/", "--").replace(".", "_")


def build_app(**options: Any) -> serve.Application:
    """Return the application of `app` with options as keyword arguments, for `serve.run`.

    Raises:
        ConfigError: an option is unknown, has no meaning on Ray Serve, or has an invalid value.
    """
    return app(options)


def _router_config(
    router: RouterConfig, engines: Sequence[EngineConfig], server: ServerConfig
) -> RouterConfig:
    """Return the configuration of the ingress: it reads the engines' KV events, and sends them their key."""
    checks_tenants = bool(server.api_keys_file)
    return dataclasses.replace(
        router,
        host="0.0.0.0",  # clients reach Ray's proxies, by whatever name
        tokenizer=tuple(dict.fromkeys(engine.tokenizer or engine.model for engine in engines)),
        api_key="" if checks_tenants else router.api_key,
        pass_client_keys=checks_tenants,
        engine_api_key=next(iter(server.api_key.split()), ""),
    )


def _check_batch_dir(path: str, ray: RayConfig) -> None:
    if not os.path.isabs(path):
        raise ConfigError(
            f"BatchConfig.batch_dir is {path!r}; it must be absolute, as Ray's processes have working "
            "directories of their own"
        )
    if not ray.ingress_replicas:
        raise ConfigError(
            "BatchConfig.batch_dir needs an ingress, which finds the engine that has a file; set "
            "RayConfig.ingress_replicas to 1 or more, or leave it out"
        )
    if ray.max_replicas:
        raise ConfigError(
            f"RayConfig.max_replicas is {ray.max_replicas}, but an engine that autoscaling ends would take "
            "its files below batch_dir along; leave one of them out"
        )


def _engines_of_roles(
    engine: EngineConfig, server: ServerConfig, ray: RayConfig, suffix: str
) -> list[serve.Application]:
    """Return the deployments of one model, with a suffix to their names."""
    server = dataclasses.replace(server, edge=EdgeConfig())  # its clients are ingress replicas
    if not ray.prefill_replicas:
        return [_engines(engine, server, ray, f"Engine{suffix}", num_replicas=ray.num_replicas)]
    prefill, decode = ray.prefill_replicas, ray.decode_replicas
    return [
        _engines(engine, server, ray, f"Prefill{suffix}", "prefill", num_replicas=prefill),
        _engines(engine, server, ray, f"Decode{suffix}", "decode", num_replicas=decode),
    ]


def _engines(
    engine: EngineConfig,
    server: ServerConfig,
    ray: RayConfig,
    name: str,
    role: EngineRole = "both",
    *,
    num_replicas: int,
) -> serve.Application:
    """Return a deployment of engines."""
    cpus = ray.replica_cpus or max(engine.num_threads, engine.tensor_parallel_size)
    engine = dataclasses.replace(engine, role=role, num_threads=engine.num_threads or math.ceil(cpus))
    batches = server.batches
    if batches.batch_dir:
        batches = dataclasses.replace(batches, batch_dir=os.path.join(batches.batch_dir, name))
    server = dataclasses.replace(server, batches=BatchConfig() if role == "prefill" else batches)
    return (
        serve.deployment(QuireServer if ray.ingress_replicas else serve.ingress()(QuireServer))
        .options(
            name=name,
            num_replicas=None if ray.max_replicas else num_replicas,
            autoscaling_config=_autoscaling(ray) if ray.max_replicas else None,
            **reserved(engine, cpus),
            **limits_of(engine, server),
            request_router_config=RequestRouterConfig(
                request_router_class="quire.ray.engine_list:EngineList", request_router_kwargs={"name": name}
            )
            if ray.ingress_replicas
            else RequestRouterConfig(),
            # Updates stop an engine first, which needs no more room and has its directory of files taken
            # over, unless there is only one.
            max_surge_percent=100 if num_replicas == 1 and not batches.batch_dir else 0,
        )
        .bind(engine, server, is_behind_ingress=bool(ray.ingress_replicas))
    )


def reserved(engine: EngineConfig, cpus: float) -> dict[str, Any]:
    """Return what Ray reserves for an engine: of several ranks, which share a machine, a bundle for each."""
    ranks = engine.tensor_parallel_size
    actor = {"num_cpus": cpus / ranks, "num_gpus": int(engine.device == "cuda")}
    if ranks == 1:
        return {"ray_actor_options": actor}
    bundle = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"]}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [
            {name: amount for name, amount in bundle.items() if amount} for _ in range(ranks)
        ],
        "placement_group_strategy": "STRICT_PACK",
    }


def limits_of(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Return the options of a deployment that follow from those of its engines."""
    scheduler = engine.scheduler
    return {
        "max_ongoing_requests": scheduler.max_num_seqs + scheduler.max_num_queued_reqs,
        "health_check_period_s": HEALTH_CHECK_PERIOD,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT,
        "graceful_shutdown_timeout_s": server.drain_timeout + END_TIMEOUT,
    }


def _autoscaling(ray: RayConfig) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=ray.num_replicas,
        max_replicas=ray.max_replicas,
        policy=AutoscalingPolicy(policy_function="quire.ray.autoscaling:LoadPolicy"),
    )


def _ingress(
    router: RouterConfig, ray: RayConfig, engines: Sequence[serve.Application], models: Sequence[str]
) -> serve.Application:
    """Return the deployment of the ingress, which has those of the engines."""
    return (
        serve.deployment(serve.ingress()(QuireIngress))
        .options(
            name="Ingress",
            num_replicas=ray.ingress_replicas,
            max_ongoing_requests=router.max_in_flight,
            health_check_period_s=HEALTH_CHECK_PERIOD,
            health_check_timeout_s=HEALTH_CHECK_TIMEOUT,
            graceful_shutdown_timeout_s=router.drain_timeout + END_TIMEOUT,
            max_surge_percent=100,
        )
        .bind(router, engines, ray.ingress_port, models=models)
    )

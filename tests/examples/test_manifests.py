"""The manifests of Kubernetes: what they ask of Quire exists, and their parts fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quire.cli import options
from quire.config import EngineConfig, RayConfig, RouterConfig, ServerConfig

KUBERNETES = Path(__file__).parents[2] / "examples" / "kubernetes"
LLM_D = (KUBERNETES / "llm-d.yaml").read_text(encoding="utf-8")
KUBERAY = (KUBERNETES / "kuberay.yaml").read_text(encoding="utf-8")


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(LLM_D) if one["kind"] == kind]


def pods() -> dict[str, dict[str, Any]]:
    """Return the pod template of each deployment by its name."""
    return {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind("Deployment")}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(one.removeprefix("--").split("=", 1) for one in container["args"] if one.startswith("--"))


def engines() -> Iterator[tuple[dict[str, Any], dict[str, Any], EngineConfig, ServerConfig]]:
    """Yield (pod, container, configurations that its arguments give) of each `quire serve`."""
    for pod in pods().values():
        for container in containers(pod):
            if container.get("command") == ["quire", "serve"]:
                yield pod, container, *configs_of(container["args"])


def configs_of(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """Return what `quire serve` is given by arguments; raise for those that it refuses."""
    given: list[tuple[EngineConfig, ServerConfig]] = []
    small = typer.Typer()

    @small.command()
    @options.config_options(positional=("model",), engine=EngineConfig, server=ServerConfig)
    def serve(engine: EngineConfig, server: ServerConfig) -> None:
        given.append((engine, server))

    typer.main.get_command(small).main(arguments, standalone_mode=False)
    return given[0]


def environment(container: dict[str, Any]) -> set[str]:
    return {one["name"] for one in container.get("env", ())}


def test_the_engines_take_every_argument():
    serving = list(engines())
    assert [engine.role for *_, engine, _ in serving] == ["both", "prefill", "decode"]
    for _, container, _, server in serving:
        assert container["args"][0] == server.served_model_name[0] == "Qwen/Qwen3-0.6B"


def test_an_argument_that_does_not_exist_is_noticed():
    with pytest.raises(Exception, match="No such option"):
        configs_of(["mini", "--no-such-option=1"])


def test_ports_are_those_that_engines_listen_on():
    for pod, container, engine, server in engines():
        ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
        if not ports:
            continue  # within the pod of the EPP
        http = "engine" if "engine" in ports else "http"
        expected = {http: server.port, "monitoring": server.edge.monitoring_port}
        events = engine.kv_events
        expected |= {"kv-events": int(events.kv_events_endpoint.rpartition(":")[2])}
        expected |= {"kv-replay": int(events.kv_events_replay_endpoint.rpartition(":")[2])}
        if engine.role == "prefill":
            expected["kv-transfer"] = engine.kv_transfer.kv_transfer_port
        assert ports == expected
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == "monitoring"
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert pod["spec"]["terminationGracePeriodSeconds"] > server.drain_timeout


def test_the_pool_reaches_engines_of_both_roles_and_the_sidecar_its_engine():
    [pool] = of_kind("InferencePool")
    [target] = [one["number"] for one in pool["spec"]["targetPorts"]]
    members = {
        name: pod
        for name, pod in pods().items()
        if pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    }
    assert {pod["metadata"]["labels"]["llm-d.ai/role"] for pod in members.values()} == {"prefill", "decode"}
    for pod in members.values():
        [http] = [
            port["containerPort"]
            for container in containers(pod)
            for port in container["ports"]
            if port["name"] == "http"
        ]
        assert http == target
    sidecar, decode = containers(members["quire-decode"])
    assert flags(sidecar)["port"] == str(target)
    assert flags(sidecar)["model-server-port"] == flags(decode)["port"]
    assert flags(sidecar)["inference-pool"] == f"$(NAMESPACE)/{pool['metadata']['name']}"
    for pod, container, engine, _ in engines():
        if pod in members.values():
            role = pod["metadata"]["labels"]["llm-d.ai/role"]
            assert engine.role == role
            assert flags(container)["kv-events-topic"] == f"kv@$(POD_IP):{target}@Qwen/Qwen3-0.6B"


def test_selectors_match_labels_and_services_match_ports():
    for deployment in of_kind("Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
    [service] = of_kind("Service")
    pod = pods()[service["metadata"]["name"]]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    assert {one["targetPort"]: one["port"] for one in service["spec"]["ports"]}.items() <= ports.items()
    [pool] = of_kind("InferencePool")
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] == ports["grpc"]
    [route] = of_kind("HTTPRoute")
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["name"], backend["port"]) == (pool["metadata"]["name"], 8000)
    accounts = {one["metadata"]["name"] for one in of_kind("ServiceAccount")}
    assert {pod["spec"].get("serviceAccountName", "quire") for pod in pods().values()} == accounts


def test_the_picker_is_configured_for_these_engines():
    [config_map] = of_kind("ConfigMap")
    epp = pods()["quire-epp"]["spec"]["containers"][0]
    file = Path(flags(epp)["config-file"])
    [mount] = epp["volumeMounts"]
    assert str(file.parent) == mount["mountPath"]
    config = yaml.safe_load(config_map["data"][file.name])
    plugins = {one["type"]: one.get("parameters", {}) for one in config["plugins"]}
    assert len(plugins) == len(config["plugins"])
    for profile in config["schedulingProfiles"]:
        assert {one["pluginRef"] for one in profile["plugins"]} <= plugins.keys()
    for source in config["dataLayer"]["sources"]:
        assert {source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])} <= plugins.keys()
    assert plugins["disagg-profile-handler"]["deciders"]["prefill"] in plugins
    assert plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"] in plugins
    [(_, render, _, rendering), *others] = engines()
    tokens = plugins["token-producer"]
    assert tokens["modelName"] == rendering.served_model_name[0]
    assert tokens["vllm"]["url"] == f"http://{rendering.host}:{rendering.port}"
    assert rendering.host == "127.0.0.1"
    assert "QUIRE_API_KEY" not in environment(render), "the EPP sends no key"
    precise = plugins["precise-prefix-cache-producer"]
    discovery = precise["kvEventsConfig"]["podDiscoveryConfig"]
    for _, container, engine, _ in others:
        assert precise["tokenProcessorConfig"]["blockSizeTokens"] == engine.scheduler.block_size
        topic = flags(container)["kv-events-topic"]
        assert topic.startswith(precise["kvEventsConfig"]["topicFilter"])
        assert topic.endswith(f"@{tokens['modelName']}")
        assert flags(container)["kv-events-endpoint"].endswith(f":{discovery['socketPort']}")
        assert flags(container)["kv-events-replay-endpoint"].endswith(f":{discovery['replaySocketPort']}")


def test_the_network_policy_lets_in_what_has_a_key_or_is_from_its_pods():
    [policy] = of_kind("NetworkPolicy")
    reachable = {
        port["port"]: rule.get("from", "all") for rule in policy["spec"]["ingress"] for port in rule["ports"]
    }
    listened = {
        port["containerPort"]
        for name in ("quire-prefill", "quire-decode")
        for container in containers(pods()[name])
        for port in container["ports"]
    }
    assert reachable.keys() == listened - {8200}, "only the sidecar calls a decode engine"
    labels = [pod["metadata"]["labels"] for pod in pods().values()]
    for port, senders in reachable.items():
        assert (senders == "all") == (port in (8000, 9000))
        if senders != "all":
            [sender] = senders
            assert sender["podSelector"]["matchLabels"] in labels


@pytest.mark.parametrize("manifest", [LLM_D, KUBERAY], ids=["llm-d", "kuberay"])
def test_every_variable_is_set_and_every_secret_is_created(manifest: str):
    for container in containers_within(list(yaml.safe_load_all(manifest))):
        used = {one.partition("$(")[2].partition(")")[0] for one in container.get("args", ()) if "$(" in one}
        assert used <= environment(container)
        for one in container.get("env", ()):
            if secret := one["valueFrom"].get("secretKeyRef"):
                assert f"create secret generic {secret['name']} " in manifest
                assert f"--from-literal={secret['key']}=" in manifest


def containers_within(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "image" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from containers_within(one)


def test_the_application_on_ray_takes_every_argument_and_fits_its_workers():
    spec = yaml.safe_load(KUBERAY)["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "quire.ray:app"
    classes = (EngineConfig, ServerConfig, RouterConfig, RayConfig)
    *_, server, _, ray = options.configs_of(application["args"], *classes)
    assert (ray.num_replicas, ray.ingress_replicas) == (2, 1)
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    cpus = int(pod["containers"][0]["resources"]["limits"]["cpu"])
    assert group["replicas"] * (cpus // ray.replica_cpus) >= ray.num_replicas
    assert group["replicas"] * cpus >= ray.num_replicas * ray.replica_cpus + ray.ingress_replicas
    assert pod["terminationGracePeriodSeconds"] > server.drain_timeout

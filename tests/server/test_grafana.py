"""The Grafana dashboard: whatever it asks for is something that a server or a router exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster.engines.metrics import Purpose, RouterMetrics
from quire.cluster.engines.registry import CachedPrefix, Engine, PrefixSource, Role
from quire.config import ServerConfig
from quire.kv.connectors.stats import KVPeerStats
from quire.server.app import create_app

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "examples" / "grafana" / "quire.json").read_text(encoding="utf-8")
)
TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*") | (?P<duration>\[[^\]]*\]) | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[A-Za-z_:][\w:]*) | (?P<operator>=~|!~|!=|[-+*/=<>(){},]) | (?P<space>\s+)""",
    re.VERBOSE,
)
FUNCTIONS = {"sum", "min", "max", "rate", "increase", "histogram_quantile", "label_values"}
ADDED_BY_PROMETHEUS = {"instance", "job"}


def parsed(expression: str) -> tuple[set[str], set[str]]:
    """Return the names of metrics and of labels in a PromQL expression; raise for what is neither."""
    tokens, position = [], 0
    while position < len(expression):
        match = TOKEN.match(expression, position)
        assert match is not None, f"cannot be read from {expression[position:]!r}"
        position = match.end()
        if match.lastgroup != "space":
            tokens.append((match.lastgroup, match[0]))
    assert expression.count("(") == expression.count(")")
    metrics, labels, depth = set(), set(), 0
    grouping = False
    for (kind, text), (_, following) in zip(tokens, [*tokens[1:], ("end", "")], strict=True):
        depth += {"{": 1, "}": -1}.get(text, 0) if kind == "operator" else 0
        if kind == "operator" and text == ")":
            grouping = False
        if kind != "name":
            continue
        if text == "by":
            assert following == "("
            grouping = True
        elif depth or grouping:
            labels.add(text)
        elif following == "(" or (text in FUNCTIONS and following == "by"):
            assert text in FUNCTIONS, f"{text} is no function"
        else:
            metrics.add(text)
    return metrics, labels


def expressions():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']}: {target['refId']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name = variable["query"]["query"].removeprefix("label_values(").partition(",")[0]
            yield f"variable {variable['name']}", name


def router_in_use() -> RouterMetrics:
    """Return the metrics of a router with an engine, each counter with its labels."""
    engine = Engine("http://localhost:8001", Role.BOTH)
    metrics = RouterMetrics([engine])
    metrics.answers.labels("200").inc()
    for counter in (metrics.requests, metrics.failures):
        counter.labels(engine.url, Purpose.ANSWER).inc()
    metrics.count_prefix(CachedPrefix(1, PrefixSource.TEXT))
    return metrics


@pytest.fixture
async def exposed(llm, tmp_path):
    """Labels by name of metric, as a router exposes them, and a server with tenants to an admin, in use."""
    (tmp_path / "keys.toml").write_text('[tenants.root]\nkeys = ["root-key"]\nadmin = true\n')
    (tmp_path / "keys.toml").chmod(0o600)
    llm.connector_stats = KVPeerStats()
    app = create_app(llm, ServerConfig(api_keys_file=str(tmp_path / "keys.toml")))
    headers = {"Authorization": "Bearer root-key"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        await http.post("/v1/completions", json={"model": "fake", "prompt": "Hi"})
        text = (await http.get("/metrics")).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text + router_in_use().exposition().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_query_is_about_metrics_and_labels_that_exist(exposed):
    for where, expression in expressions():
        metrics, labels = parsed(expression)
        assert metrics, where
        assert not metrics - exposed.keys(), f"{where} asks for metrics that do not exist"
        known = set().union(*(exposed[name] for name in metrics)) | ADDED_BY_PROMETHEUS
        assert not labels - known, f"{where} asks for labels that do not exist"


def test_every_legend_names_a_label_that_its_query_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            kept = {
                name for names in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in names.split(", ")
            }
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_have_places_and_numbers_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_panel_is_about_the_servers_or_routers_that_are_chosen():
    for where, expression in expressions():
        if not where.startswith("variable"):
            chosen = "router" if "quire_route_" in expression else "instance"
            selected = expression.count(f'{{instance=~"${chosen}"')
            assert selected == expression.count("quire_"), where


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sum(a_total)", ({"a_total"}, set())),
        ('sum by (le, x) (rate(a:b{c="d (e)", f!~"g"}[5m])) / b', ({"a:b", "b"}, {"le", "x", "c", "f"})),
        ("histogram_quantile(0.9, sum by (le) (rate(a_bucket[$__rate_interval])))", ({"a_bucket"}, {"le"})),
    ],
)
def test_names_are_found_in_expressions(expression, expected):
    assert parsed(expression) == expected


@pytest.mark.parametrize("expression", ["sun(a)", "sum(a", "a ? b", "sum by a"])
def test_what_is_no_expression_is_noticed(expression):
    with pytest.raises(AssertionError):
        parsed(expression)

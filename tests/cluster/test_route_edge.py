"""How clients reach a router: over TLS, over a Unix socket, from browsers, behind proxies."""

import contextlib
import ssl

import httpx

from certificates import certificate
from logged import logged
from quire.cluster.engines.registry import Engine, Role
from quire.cluster.route import monitored, routing
from quire.config import EdgeConfig, RouterConfig
from quire.server.http.listening import bound_socket, listener, url_of


async def test_over_tls_and_a_unix_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = certificate(tmp_path, "router")
    trusting = ssl.create_default_context(cafile=files.certificate)
    tls = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    for uds in ("", "router.sock"):
        config = RouterConfig(edge=EdgeConfig(uds=uds, **tls))
        transport = httpx.AsyncHTTPTransport(verify=trusting, uds=uds or None)
        with listener("127.0.0.1", 0, config.edge) as listens:
            url = "https://localhost" if uds else listens.url
            async with (
                routing(config, listens.socket, listens.tls),
                httpx.AsyncClient(transport=transport) as http,
            ):
                assert (await http.get(f"{url}/health")).json()["status"] == "unavailable"


async def test_only_its_own_pages_change_a_router(routed, engine):
    http, router = await routed(edge=EdgeConfig(cors_origins=("*",)), engine=[engine])
    body = b'{"url": "http://evil.example", "role": "both"}'
    evil = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    refused = await http.post("/route/engines", content=body, headers=evil)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_site_request")
    for method in ("POST", "DELETE"):
        asked = await http.options("/route/engines", headers=preflight(method))
        assert asked.status_code == 405
    assert list(router.engines.by_url) == [engine.url]
    own = {"Origin": str(http.base_url).rstrip("/"), "Content-Type": "text/plain"}
    assert (await http.post("/route/engines", content=body, headers=own)).status_code == 200


async def test_a_router_is_called_by_its_own_names(routed, engine):
    http, _ = await routed(engine=[engine])
    rebound = await http.get("/route/engines", headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "host_not_allowed")


async def test_pages_read_a_routers_answers_where_that_is_allowed(routed, engine):
    body = {"model": "m", "prompt": "Hi"}
    page = {"Origin": "https://chat.example.com"}
    http, _ = await routed(edge=EdgeConfig(cors_origins=(page["Origin"],)), engine=[engine], api_key="secret")
    asked = await http.options("/v1/completions", headers=preflight("POST"))
    assert asked.status_code == 200
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization"
    for key, status in [("secret", 200), ("wrong", 401)]:
        for stream in (False, True):
            sent = {**page, "x-api-key": key}
            answer = await http.post("/v1/completions", json={**body, "stream": stream}, headers=sent)
            assert answer.status_code == status
            assert answer.headers.get_list("Access-Control-Allow-Origin") == [page["Origin"]]
    other = {"Origin": "https://evil.example", "x-api-key": "secret"}
    answer = await http.post("/v1/completions", json=body, headers=other)
    assert "Access-Control-Allow-Origin" not in answer.headers


def preflight(method):
    return {
        "Origin": "https://chat.example.com",
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization",
    }


async def test_a_router_logs_each_request(monkeypatch):
    with logged(monkeypatch) as lines, listener("127.0.0.1", 0, EdgeConfig()) as listens:
        config = RouterConfig(engine=(), api_key="secret")
        async with routing(config, listens.socket, None, lines.log), httpx.AsyncClient() as http:
            key = {"x-api-key": "secret"}
            body = {"model": "m", "prompt": "Hi"}
            url = f"{listens.url}/v1/completions"
            await http.post(f"{url}?a=b", json=body, headers={**key, "X-Request-Id": "mine"})
            await http.post(url, json=body)
            await http.get(f"{listens.url}/health")
            await http.get(f"{listens.url}/no%0Awhere", headers=key)
            await http.get(f"{listens.url}/route/engines", headers=key)
        entries = lines.entries
    assert [(entry["path"], entry["status"], entry.get("error")) for entry in entries] == [
        ("/v1/completions", 503, "no_engine"),
        ("/v1/completions", 401, "invalid_api_key"),
        ("/health", 503, None),
        ("/no%0Awhere", 404, "route_not_found"),
        ("/route/engines", 200, None),
    ]
    assert entries[0]["request_id"] == "mine"
    assert entries[0]["client"] == "127.0.0.1"
    assert entries[1]["request_id"] not in ("", "mine")


async def test_the_monitoring_port_answers_while_the_event_loop_is_blocked(routed, engine):
    _, router = await routed(engine=[engine], api_key="secret")
    with contextlib.closing(bound_socket("127.0.0.1", 0)) as bound:
        async with monitored(router, bound):
            url = url_of("127.0.0.1", bound)  # the calls that follow block this event loop
            assert httpx.get(f"{url}/live").json()["status"] == "ok"
            assert httpx.get(f"{url}/health").json()["status"] == "ok"
            assert "quire_route_in_flight 0.0" in httpx.get(f"{url}/metrics").text
            router.calls.begin_drain()
            assert httpx.get(f"{url}/health").json()["status"] == "draining"


async def test_an_engine_with_a_key_of_its_own_gets_no_other(routed, engine):
    http, router = await routed(engine=[engine], engine_api_key="shared")
    await router.remove(router.engines.by_url[engine.url])
    await router.add(Engine(engine.url, Role.BOTH, key="own"))
    body = {"model": "mini", "prompt": "hi"}
    await http.post("/v1/completions", json=body, headers={"Authorization": "Bearer x", "x-api-key": "x"})
    [seen] = engine.seen
    assert seen.headers["authorization"] == "Bearer own"
    assert "x-api-key" not in seen.headers

"""How clients reach a router: over TLS, over a Unix socket, from browsers, behind proxies."""

import ssl

import httpx

from certificates import certificate
from quire.cluster.route import routing
from quire.config import EdgeConfig, RouterConfig
from quire.server.listening import listener


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

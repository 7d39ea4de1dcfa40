"""What web pages may do to a server: names that it is called by, origins, CORS."""

import contextlib
import socket

import httpx
import pytest

from quire.config import EdgeConfig, ServerConfig
from quire.errors import ConfigError
from quire.server.app import create_app
from quire.server.edge.browsers import CallerRules

PAGE = "https://chat.example.com"
BODY = {"model": "fake", "prompt": "Hi", "max_tokens": 3}


def refusal(edge=None, host="127.0.0.1", **request):
    rules = CallerRules(edge or EdgeConfig(), host)
    return rules.refusal(**{"method": "GET", "http_version": "1.1", "hosts": ["localhost"], **request})


@pytest.fixture
async def calling(llm):
    """Return a client of a server with a key and this `EdgeConfig`."""
    async with contextlib.AsyncExitStack() as stack:

        async def client(**edge):
            app = create_app(llm, ServerConfig(api_key="secret", edge=EdgeConfig(**edge)))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
            http.headers["Authorization"] = "Bearer secret"
            return await stack.enter_async_context(http)

        yield client


OWN = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.8.8.8",
    "[::1]:80",
    "[0:0::1]",
]
FOREIGN = [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", "[::2]",
    "::1", "", "evil.example:80:localhost", "localhost@evil.example", "localhost evil", "*", "127.1",
    "evil.example\\localhost", "[::1].evil", "localhost,evil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_on_a_loopback_address_a_server_is_called_by_its_own_names(host):
    for name in OWN:
        assert refusal(host=host, hosts=[name]) is None
    for name in FOREIGN:
        error = refusal(host=host, hosts=[name])
        assert (error.status, error.code) == (421, "host_not_allowed")
        assert repr(name) in error.message
        assert "allowed_hosts" in error.message


def test_elsewhere_it_is_called_by_any_unless_names_are_given():
    for host in ("0.0.0.0", "", "::"):
        assert all(refusal(host=host, hosts=[name]) is None for name in (*OWN, *FOREIGN))
        edge = EdgeConfig(allowed_hosts=("api.example.com", "*.EXAMPLE.org"))
        for name in (*OWN, "api.example.com", "API.example.com.:443", "a.example.org", "a.b.example.org:1"):
            assert refusal(edge, host, hosts=[name]) is None
        for name in (*FOREIGN, "example.com", "b.example.com", "example.org", "badexample.org"):
            assert refusal(edge, host, hosts=[name]).status == 421


def test_any_name_where_that_is_asked_for_and_over_a_unix_socket():
    for edge in (EdgeConfig(allowed_hosts=("*",)), EdgeConfig(uds="a.sock", allowed_hosts=("b.example",))):
        assert all(refusal(edge, hosts=[name]) is None for name in FOREIGN)


def test_there_is_one_host_header():
    assert refusal(http_version="1.0", hosts=[]) is None
    for version, hosts in [("1.1", []), ("1.1", ["localhost"] * 2), ("1.0", ["localhost", "a"])]:
        error = refusal(http_version=version, hosts=hosts)
        assert (error.status, error.code) == (400, "bad_host")


FORM_TYPES = [
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=a",
    "text/json",
]


@pytest.mark.parametrize("content_type", FORM_TYPES)
def test_a_page_of_another_site_sends_nothing_unasked(content_type):
    def posted(origin, edge=None, **request):
        request = {"method": "POST", "hosts": ["localhost:8000"], "content_type": content_type, **request}
        return refusal(edge, origin=origin, **request)

    for origin in ("https://evil.example", "null", "http://localhost:9000", "http://localhost", "//[", PAGE):
        error = posted(origin)
        assert (error.status, error.code) == (403, "cross_site_request")
        assert "cors_origins" in error.message
    assert posted("http://localhost:8000") is None  # its own page
    assert posted("") is None  # no browser
    listed = EdgeConfig(cors_origins=(PAGE,))
    assert posted(PAGE, listed) is None
    assert posted("https://evil.example", listed).status == 403
    assert posted("https://evil.example", EdgeConfig(cors_origins=("*",))) is None
    assert refusal(origin="https://evil.example") is None  # a GET does nothing, and stays unread


async def test_refusals_reach_the_client_and_nothing_else_runs(calling, llm):
    http = await calling()
    rebound = await http.post("/v1/completions", json=BODY, headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "host_not_allowed")
    assert rebound.headers["x-request-id"]
    form = await http.post(
        "/v1/completions", content="{}", headers={"Origin": PAGE, "Content-Type": "text/plain"}
    )
    assert form.status_code == 403
    assert not llm.seen
    assert (await http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})).status_code == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"GET /health HTTP/1.1"], b"400"),
        ([b"GET /health HTTP/1.1", b"Host: localhost", b"Host: localhost"], b"400"),
        ([b"GET /health HTTP/1.1", b"Host: evil.example"], b"421"),
        ([b"GET /health HTTP/1.1", b"Host: localhost"], b"200"),
        ([b"GET /health HTTP/1.0"], b"200"),
    ],
)
def test_host_headers_on_a_real_connection(live, lines, status):
    host, port = live.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        assert connection.makefile("rb").readline().split()[1] == status


def preflight(origin, method="POST"):
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        "Authorization": "",
    }


@pytest.mark.parametrize("origins", [("*",), (PAGE, "http://localhost:3000")])
async def test_pages_that_are_named_may_call(calling, origins):
    http = await calling(cors_origins=origins)
    asked = await http.options("/v1/completions", headers=preflight(PAGE))
    assert asked.status_code == 200
    allowed = "*" if origins == ("*",) else PAGE
    assert asked.headers["access-control-allow-origin"] == allowed
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={**BODY, "stream": stream}, headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    without_key = await http.post("/v1/completions", json=BODY, headers={"Origin": PAGE, "Authorization": ""})
    assert without_key.status_code == 401
    assert without_key.headers["access-control-allow-origin"] == allowed  # the page sees what is wrong


@pytest.mark.parametrize("origins", [(), ("http://localhost:3000",)])
async def test_others_may_not(calling, origins):
    http = await calling(cors_origins=origins)
    asked = await http.options("/v1/completions", headers=preflight(PAGE))
    assert asked.status_code in (400, 401)
    answer = await http.post("/v1/completions", json=BODY, headers={"Origin": PAGE})
    for one in (asked, answer):
        assert "access-control-allow-origin" not in one.headers


@pytest.mark.parametrize("method", ["DELETE", "PUT"])
async def test_pages_call_with_get_and_post_only(calling, method):
    http = await calling(cors_origins=("*",))
    assert (await http.options("/v1/models", headers=preflight(PAGE, method))).status_code == 400


@pytest.mark.parametrize("name", ["", "http://a", "a/b", "[::1", "a:b"])
def test_names_of_hosts_are_checked(name):
    with pytest.raises(ConfigError, match=r"EdgeConfig\.allowed_hosts has .*api\.example\.com"):
        EdgeConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    "origin", ["", "null", "chat.example.com", f"{PAGE}/", f"{PAGE}/a", "https://Chat.example.com", "http://a:0",
               "http://a:b", "http://u@a", "*.example.com"]
)  # fmt: skip
def test_origins_are_checked(origin):
    with pytest.raises(ConfigError, match=r"EdgeConfig\.cors_origins has .*https://chat\.example\.com"):
        EdgeConfig(cors_origins=(origin,))

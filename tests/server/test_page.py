"""The page at /, as far as it can be looked at without a browser."""

import re

import httpx
import pytest

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.control.page_files import page_files

FILES = page_files(needs_key=False)
PATHS = sorted(FILES)
SVG = "http://www.w3.org/2000/svg"  # a name, which nothing is loaded from


def http_of(llm, **config):
    app = create_app(llm, ServerConfig(**config))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


@pytest.mark.parametrize("path", PATHS)
async def test_each_file_is_bound_to_its_own_server(http, path):
    answer = await http.get(path)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_types_are_those_that_browsers_want(http):
    assert {(await http.get(path)).headers["content-type"] for path in PATHS} == {
        "text/html; charset=utf-8",
        "text/css; charset=utf-8",
        "text/javascript; charset=utf-8",
        "image/svg+xml",
        "application/json",
    }


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_that_has_not_changed_is_not_sent_again(http, path):
    first = await http.get(path)
    assert first.headers["cache-control"] == "no-cache"
    again = await http.get(path, headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert (await http.get(path, headers={"If-None-Match": '"other"'})).content == first.content


@pytest.mark.parametrize("path", PATHS)
async def test_head_has_the_headers_alone(http, path):
    whole, head = await http.get(path), await http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "content-type", "etag", "content-security-policy"):
        assert head.headers[name] == whole.headers[name]


def test_nothing_comes_from_another_server_and_nothing_is_inline():
    for path, content in FILES.items():
        text = content.decode()
        assert not re.findall(r"(?:https?:)?//[\w.]+\.\w+", text.replace(SVG, "")), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
    page = FILES["/"].decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_links_are_relative_and_lead_to_files():
    page = FILES["/"].decode()
    used = {"/", *(f"/{link}" for link in re.findall(r'(?:href|src)="([^"#]+)"', page))}
    for content in FILES.values():
        imports = re.findall(r'^import .*?"\./(.+)";$', content.decode(), re.MULTILINE)
        used.update(f"/page/{name}" for name in imports)
    assert used | {"/page/server.json"} == {*FILES, "/docs"}


async def test_it_needs_no_key_and_what_it_asks_for_does(llm):
    async with http_of(llm, api_key="secret") as http:
        for path in PATHS:
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/page/server.json")).json() == {"needs_key": True}
        for path in ("/stats", "/v1/requests", "/v1/models", "/openapi.json", "/page/", "/page/other.js"):
            assert (await http.get(path)).status_code == 401


async def test_a_server_may_do_without(llm):
    async with http_of(llm, page=False) as http:
        for path in PATHS:
            assert (await http.get(path)).status_code == 404
    async with http_of(llm, page=False, api_key="secret") as http:
        assert (await http.get("/")).status_code == 401
    async with http_of(llm) as http:
        assert (await http.get("/page/server.json")).json() == {"needs_key": False}


@pytest.mark.parametrize("path", ["/llm/", "/llm/page/app.js", "/page/app.js"])
async def test_it_may_be_below_a_path(llm, path):
    async with http_of(llm, root_path="/llm", api_key="secret") as http:
        assert (await http.get(path)).status_code == 200


async def test_other_names_and_methods_are_refused(http):
    for path in ("/page", "/page/index.html", "/page/..%2fapp.py", "/index.html"):
        assert (await http.get(path)).status_code == 404
    assert (await http.post("/")).status_code == 405

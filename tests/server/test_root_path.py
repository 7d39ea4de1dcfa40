"""Serving below a path, behind a proxy that takes it off or not."""

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.app import create_app


@pytest.fixture
async def below(llm):
    app = create_app(llm, ServerConfig(root_path="/llm/v1", api_key="secret"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        http.headers["x-api-key"] = "secret"
        yield http


@pytest.mark.parametrize("kept", ["/llm/v1", ""])
async def test_a_proxy_may_keep_the_path_or_take_it_off(below, kept):
    body = {"model": "fake", "prompt": "Hi", "max_tokens": 3}
    assert (await below.post(f"{kept}/v1/completions", json=body)).json()["choices"][0]["text"] == "the"
    assert (await below.get(f"{kept}/v1/models/fake")).status_code == 200
    assert (await below.get(f"{kept}/health", headers={"x-api-key": ""})).status_code == 200
    assert (await below.get(f"{kept}/v1/models", headers={"x-api-key": ""})).status_code == 401
    document = (await below.get(f"{kept}/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm/v1"}]
    assert "/v1/completions" in document["paths"]
    page = (await below.get(f"{kept}/docs")).text
    assert 'href="openapi.json"' in page
    assert "<code>/llm/v1</code>" in page


@pytest.mark.parametrize("path", ["/llm/v1", "/llm/v1x/health", "/llm/v1/llm/v1/health", "/x/health"])
async def test_only_that_path_is_taken_off(below, path):
    assert (await below.get(path)).status_code == 404


async def test_without_it_paths_are_as_they_are(http):
    assert (await http.get("/openapi.json")).json()["servers"] == [{"url": "/"}]
    assert "<p>All of them begin" not in (await http.get("/docs")).text


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/a b", "/a?b", "/ä", "https://a/llm"])
def test_it_is_checked(path):
    with pytest.raises(ConfigError, match=r"ServerConfig\.root_path is .*it must be like /llm"):
        ServerConfig(root_path=path)

"""One model under several names."""

import httpx
import openai
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.server.app import create_app

USER = {"role": "user", "content": "Hi"}
NAMES = ("gpt-4o", "org/own", "gpt-4o")


@pytest.fixture
async def http(llm):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(served_model_name=NAMES)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("name", ["gpt-4o", "org/own"])
async def test_the_name_that_was_asked_for_comes_back(http, client, name):
    assert (await client.chat.completions.create(model=name, messages=[USER])).model == name
    assert (await client.completions.create(model=name, prompt="Hi")).model == name
    stream = await client.completions.create(model=name, prompt="Hi", stream=True)
    assert {chunk.model async for chunk in stream} == {name}
    assert (await client.responses.create(model=name, input="Hi")).model == name
    body = {"model": name, "messages": [USER], "max_tokens": 5}
    assert (await http.post("/v1/messages", json=body)).json()["model"] == name
    assert (await client.models.retrieve(name)).id == name


@pytest.mark.parametrize(("served", "asked"), [("a", "a:latest"), ("a:latest", "a"), ("a", "a")])
async def test_the_tag_latest_may_be_left_out_or_added(llm, served, asked):
    app = create_app(llm, ServerConfig(served_model_name=(served,)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        answer = await http.post("/v1/completions", json={"model": asked, "prompt": "Hi"})
        assert answer.json()["model"] == asked
        assert (await http.get(f"/v1/models/{asked}:8b")).status_code == 404


async def test_all_names_are_listed_once(client):
    assert [model.id for model in (await client.models.list()).data] == ["gpt-4o", "org/own"]


async def test_another_name_is_refused(client):
    with pytest.raises(openai.NotFoundError, match="this server has 'gpt-4o', 'org/own'"):
        await client.completions.create(model="fake", prompt="Hi")


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerConfig(served_model_name=("",))

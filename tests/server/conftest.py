import httpx
import openai
import pytest
from fake_llm import FakeLLM
from live_server import MAX_BODY_BYTES, served

from quire.config import ServerConfig
from quire.server.app import create_app


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def app(llm):
    return create_app(llm, ServerConfig(max_body_bytes=MAX_BODY_BYTES))


@pytest.fixture
async def http(app):
    """An httpx client that calls the application in this event loop, without a socket."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def strict_http(llm):
    """Like `http`, of a server that refuses whatever has no effect."""
    app = create_app(llm, ServerConfig(max_body_bytes=MAX_BODY_BYTES, strict=True))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def client(http):
    """The asynchronous openai client over `http`."""
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
def live(app):
    """The application behind a real socket; yields its URL."""
    with served(app) as url:
        yield url

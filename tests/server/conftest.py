import httpx
import openai
import pytest
from fake_llm import FakeLLM
from live_server import MAX_BODY_BYTES, served

from quire.config import ServerConfig
from quire.server import app as server_app
from quire.server.app import create_app


@pytest.fixture(scope="session", autouse=True)
def documents_made_once():
    """Applications describe the same routes, and that takes much longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "openapi_document", once_for_each(server_app.openapi_document))
        patch.setattr(server_app, "docs_page", once_for_each(server_app.docs_page))
        yield


def once_for_each(function):
    """Call a function once for the same objects, which need not be hashable."""
    made = {}  # holds the arguments too, so that nothing else gets their identities

    def remembered(*arguments):
        key = tuple(one if isinstance(one, str) else id(one) for one in arguments)
        if key not in made:
            made[key] = arguments, function(*arguments)
        return made[key][1]

    return remembered


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

import asyncio
import contextlib

import httpx
import pytest
from fake_upstream import LONG, TIMEOUT, FakeEngine, running

from quire.cluster.route import routing
from quire.config import RouterConfig
from quire.server.http.listening import bound_socket, url_of


class Clock:
    """The event loop's clock, which a test can set forward: so that what times out does so at once."""

    def __init__(self, loop):
        self._time = loop.time
        self._ahead = 0.0
        loop.time = lambda: self._time() + self._ahead

    def skip(self):
        self._ahead += 2 * TIMEOUT


@pytest.fixture
async def clock():
    return Clock(asyncio.get_running_loop())


@pytest.fixture
async def routed(clock):
    """Start fake engines and a router in front of them: returns an HTTP client, and the router."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, prefill=(), decode=(), engine=(), hanging_times_out=False, **config):
            for one in (*prefill, *decode, *engine):
                one.on_hang = clock.skip if hanging_times_out else lambda: None
            await stack.enter_async_context(running(*prefill, *decode, *engine))
            bound = stack.enter_context(contextlib.closing(bound_socket("127.0.0.1", 0)))
            urls = {
                "prefill": tuple(one.url for one in prefill),
                "decode": tuple(one.url for one in decode),
                "engine": tuple(one.url for one in engine),
            }
            defaults = {
                "health_interval": LONG,
                "recovery_timeout": 0.0,
                "min_prefill_bytes": 20,
                "first_byte_timeout": LONG,
            }
            defaults |= dict.fromkeys(("prefill_timeout", "idle_timeout", "connect_timeout"), LONG)
            router = await stack.enter_async_context(
                routing(RouterConfig(**urls, **{**defaults, **config}), bound)
            )
            http = httpx.AsyncClient(base_url=url_of("127.0.0.1", bound), timeout=None, verify=False)
            return await stack.enter_async_context(http), router

        yield start


@pytest.fixture
def engine():
    return FakeEngine()

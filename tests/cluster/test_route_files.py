"""Files and batches behind a router: each engine keeps its own, and clients see one server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import httpx
import openai
import pytest

import preloaded
from quire import AsyncLLM, EngineConfig, SchedulerConfig
from quire.cluster import files
from quire.cluster.route import routing
from quire.config import BatchConfig, ConnectionConfig, RouterConfig, ServerConfig
from quire.server.app import create_app
from quire.server.batches.answers import Batch, FileObject, RequestCounts
from quire.server.http.listening import bound_socket, url_of
from quire.server.http.server import HttpServer
from quire.server.serve import close_state, start_state

LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "mini", "prompt": "Once", "max_tokens": 2},
}
REQUESTS = json.dumps(LINE).encode() + b"\n"
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
TAIL = b"\r\n--b--\r\n"


@pytest.fixture(scope="module")
def llm():
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=64)))
    yield llm
    asyncio.run(llm.shutdown())


class Server:
    """An engine's server, with a directory of its own or none, which comes back at the same port."""

    def __init__(self, llm, directory):
        self._llm = llm
        self._config = ServerConfig(
            batches=BatchConfig(batch_dir=str(directory or ""), max_file_bytes=1 << 20)
        )
        self._stack = contextlib.AsyncExitStack()
        self._port = 0

    async def start(self):
        await self._llm.wait_until_ready()
        self.app = create_app(self._llm, self._config)
        await start_state(self.app)
        self._stack.push_async_callback(close_state, self.app)
        bound = self._stack.enter_context(contextlib.closing(bound_socket("127.0.0.1", self._port)))
        self._port = bound.getsockname()[1]
        await self._stack.enter_async_context(HttpServer(self.app, ConnectionConfig()).serving(bound))

    async def stop(self):
        await self._stack.aclose()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    @property
    def tenant(self):
        return self.app.state.context.tenants.default.name

    @property
    def batches(self):
        return self.app.state.batches


class Cluster:
    """Servers behind a router."""

    def __init__(self, servers):
        self.servers = servers
        self._stack = contextlib.AsyncExitStack()

    async def start(self):
        for server in self.servers:
            await server.start()
            self._stack.push_async_callback(server.stop)
        await self.route()

    async def route(self):
        """Start a router, which knows nothing yet."""
        bound = self._stack.enter_context(contextlib.closing(bound_socket("127.0.0.1", 0)))
        config = RouterConfig(engine=tuple(server.url for server in self.servers), health_interval=1e6)
        self.router = await self._stack.enter_async_context(routing(config, bound))
        self.http = httpx.AsyncClient(base_url=url_of("127.0.0.1", bound), timeout=60)
        await self._stack.enter_async_context(self.http)
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.http.base_url}/v1", api_key="none", http_client=self.http, max_retries=0
        )

    async def aclose(self):
        await self._stack.aclose()

    async def uploaded(self, content=REQUESTS):
        return await self.client.files.create(file=("requests.jsonl", content), purpose="batch")

    async def uploaded_to_each(self):
        """Return a file of each server, by its URL."""
        found = {}
        while len(found) < len(self.servers):
            file = await self.uploaded()
            for server in self.servers:
                if await server.batches.records.get_file(server.tenant, file.id):
                    found[server.url] = file
        return found


@pytest.fixture
async def clusters(llm, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def start(*directories):
            cluster = Cluster([Server(llm, one and tmp_path / one) for one in directories])
            stack.push_async_callback(cluster.aclose)
            await cluster.start()
            return cluster

        yield start


async def refusal(call):
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value


async def test_a_batch_is_where_its_file_is(clusters):
    cluster = await clusters("a", None, "b")
    client = cluster.client
    done = []
    for _ in range(4):
        file = await cluster.uploaded()
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status != "completed":
            assert batch.status not in ("failed", "expired")
            batch = await client.batches.retrieve(batch.id)
        output = await client.files.content(batch.output_file_id)
        assert json.loads(output.content)["response"]["status_code"] == 200
        assert (await refusal(client.batches.cancel(batch.id))).status_code == 409
        done.append(batch.id)
    assert {one.id for one in (await client.batches.list()).data} == set(done)
    assert all([await server.batches.records.file_ids() for server in cluster.servers[::2]])
    listed = [file.id async for file in client.files.list()]
    assert len(listed) == len(set(listed)) == 8
    for file_id in listed:
        assert (await client.files.delete(file_id)).deleted
        assert (await refusal(client.files.retrieve(file_id))).code == "file_not_found"
    assert (await client.files.list()).data == []


async def test_an_engine_that_is_down_has_lost_nothing(clusters):
    cluster = await clusters("a", "b")
    found = await cluster.uploaded_to_each()
    gone, up = cluster.servers
    await gone.stop()
    await cluster.route()  # it has never seen the engine
    client, lost = cluster.client, found[gone.url].id
    for call in (
        client.files.retrieve(lost),
        client.files.content(lost),
        client.files.delete(lost),
        client.batches.create(input_file_id=lost, endpoint="/v1/completions", completion_window="24h"),
        client.files.list(after=lost),
    ):
        error = await refusal(call)
        assert error.status_code == 503
        assert repr(lost) in error.message
        assert f"{gone.url} is down" in error.message
    for listing in (client.files.list(), client.batches.list()):
        error = await refusal(listing)
        assert (error.status_code, f"{gone.url} is down" in error.message) == (503, True)
    assert (await client.files.retrieve(found[up.url].id)).id == found[up.url].id
    await cluster.uploaded()
    await gone.start()
    await cluster.route()
    assert (await cluster.client.files.retrieve(lost)).id == lost


async def test_a_file_of_an_engine_that_was_removed_is_not_called_lost(clusters):
    cluster = await clusters("a", "b")
    found = await cluster.uploaded_to_each()
    gone, up = cluster.servers
    await cluster.http.delete("/route/engines", params={"url": gone.url})
    error = await refusal(cluster.client.files.retrieve(found[gone.url].id))
    assert (error.status_code, error.code) == (503, "no_engine")
    assert "in a directory that no engine has now" in error.message
    for never_there in ("file-x", found[up.url].id[:-1] + "g"):
        assert (await refusal(cluster.client.files.retrieve(never_there))).code == "file_not_found"


async def test_engines_without_directories(clusters):
    cluster = await clusters(None, None)
    client = cluster.client
    for call in (cluster.uploaded(), client.files.list(), client.batches.list(), client.files.retrieve("f")):
        error = await refusal(call)
        assert (error.status_code, error.code) == (404, "no_batches")


def file_of(number, time):
    return FileObject(
        id=f"file-{number}",
        bytes=1,
        created_at=time,
        filename="f",
        purpose=("batch", "batch_output")[number % 2],
    )


def batch_of(number, time):
    return Batch(
        id=f"batch_{number}",
        endpoint="/v1/completions",
        input_file_id="f",
        completion_window="24h",
        status="completed",
        created_at=time,
        expires_at=time,
        request_counts=RequestCounts(),
    )


@pytest.mark.parametrize("seed", range(2))
async def test_lists_of_all_engines_are_merged_page_by_page(clusters, monkeypatch, seed):
    cluster = await clusters("a", "b", "c")
    rng = random.Random(seed)
    monkeypatch.setattr(files, "MAX_LISTED", 7)
    order = []
    for number, time in enumerate(sorted(rng.randint(1, 8) for _ in range(18))):
        server = rng.choice(cluster.servers)
        await server.batches.records.add_file(server.tenant, file_of(number, time), 100)
        await server.batches.records.add_batch(server.tenant, batch_of(number, time))
        order.append((time, server.url, number))
    newest = [number for *_, number in sorted(order, key=lambda one: (-one[0], one[1], -one[2]))]
    oldest = [number for *_, number in sorted(order)]
    for limit in (1, 4, 40):
        for name, expected in (("desc", newest), ("asc", oldest)):
            pages = cluster.client.files.list(limit=limit, order=name)
            assert [file.id async for file in pages] == [f"file-{number}" for number in expected]
        pages = cluster.client.batches.list(limit=limit)
        assert [batch.id async for batch in pages] == [f"batch_{number}" for number in newest]
    pages = cluster.client.files.list(limit=2, purpose="batch_output")
    assert [file.id async for file in pages] == [f"file-{number}" for number in newest if number % 2]
    page = (await cluster.http.get("/v1/files?limit=5")).json()
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][4]["id"])
    times = [
        one["created_at"] for one in (await cluster.http.get("/v1/files?from_time=4&limit=7")).json()["data"]
    ]
    assert times[0] <= 4
    error = await refusal(cluster.client.files.list(after="file-gone"))
    assert error.status_code == 404
    assert "file-gone" in error.message


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "before=f", "from_time=-1"])
async def test_a_list_that_cannot_be_made_is_refused(clusters, query):
    cluster = await clusters("a")
    answer = await cluster.http.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_a_file_is_passed_on_as_it_arrives(clusters):
    cluster = await clusters("a")
    [server] = cluster.servers
    content = random.Random(0).randbytes(1 << 20)

    async def slow_body():
        yield HEAD + content[: 1 << 19]
        while server.batches.stored.has_room(server.tenant, server.batches.stored.limit):
            await asyncio.sleep(0.001)  # until it is on the engine's disk
        yield content[1 << 19 :] + TAIL

    answer = await cluster.http.post("/v1/files", content=slow_body(), headers=FORM)
    assert answer.status_code == 200, answer.text
    assert (await cluster.client.files.content(answer.json()["id"])).content == content
    assert (await cluster.uploaded(content)).bytes == len(content)


async def test_a_client_that_leaves_leaves_no_file(clusters):
    cluster = await clusters("a")
    [server] = cluster.servers

    async def body():
        yield HEAD + bytes(1 << 19)
        while server.batches.stored.has_room(server.tenant, server.batches.stored.limit):
            await asyncio.sleep(0.001)
        raise ConnectionError("the client dies")

    with pytest.raises(ConnectionError):
        await cluster.http.post("/v1/files", content=body(), headers=FORM)
    while server.batches.num_uploads or cluster.router.num_serving:
        await asyncio.sleep(0.001)
    assert await server.batches.records.file_ids() == set()
    assert server.batches.stored.has_room(server.tenant, server.batches.stored.limit)


@pytest.mark.parametrize("is_sized", [True, False])
async def test_an_engine_refuses_an_upload(clusters, is_sized):
    cluster = await clusters("a", "b")

    async def chunks():
        yield HEAD
        for _ in range(64):
            yield bytes(1 << 16)
        yield TAIL

    content = HEAD + bytes(1 << 22) + TAIL if is_sized else chunks()
    answer = await cluster.http.post("/v1/files", content=content, headers=FORM)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    answer = await cluster.http.post(
        "/v1/files", content=HEAD.replace(b"batch", b"vision") + TAIL, headers=FORM
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")
    answer = await cluster.http.post("/v1/files", json={})
    assert answer.status_code == 415
    assert (await cluster.uploaded()).bytes == len(REQUESTS)

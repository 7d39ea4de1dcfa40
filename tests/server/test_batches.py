"""Files and batches, by the real client: their life, what is refused, and what a dead server has left."""

import asyncio
import contextlib
import errno
import json
import os

import httpx
import openai
import pytest
from scripted_llm import ScriptedLLM

from logged import logged
from quire.config import BatchConfig, ServerConfig
from quire.errors import ConfigError
from quire.request_options import LOWEST_PRIORITY
from quire.server.app import create_app
from quire.server.batches import handlers, input_lines, job, records, service, upload
from quire.server.batches.directory import BatchDirectory
from quire.server.batches.input_lines import InputCheck
from quire.server.batches.results import ResultFile
from quire.server.serve import close_state, start_state
from quire.server.wire.leniency import HEADER

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = {"model": "fake"}


def line(custom_id, url=COMPLETIONS, **body):
    body = body or {"prompt": f"Line {custom_id}", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**MODEL, **body}}


def jsonl(*lines):
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


@contextlib.asynccontextmanager
async def serving(llm, directory, *, log=None, strict=False, **config):
    """Yield a client of a server with files and batches in `directory`, and its application."""
    batches = BatchConfig(batch_dir=str(directory), **config)
    app = create_app(llm, ServerConfig(batches=batches, strict=strict), log=log)
    await start_state(app)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
    )
    client.app = app
    try:
        yield client
    finally:
        await close_state(app)


@pytest.fixture
def llm():
    return ScriptedLLM()


@pytest.fixture
async def client(llm, tmp_path):
    async with serving(llm, tmp_path / "batches", max_batch_requests=2) as client:
        yield client


async def uploaded(client, content, name="requests.jsonl"):
    return await client.files.create(file=(name, content), purpose="batch")


async def begun(client, *lines, endpoint=COMPLETIONS, **fields):
    file = await uploaded(client, jsonl(*lines))
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def until(client, batch_id, *statuses):
    while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
        await asyncio.sleep(0.001)
    return batch


async def ended(client, batch_id):
    return await until(client, batch_id, "completed", "failed", "expired", "cancelled")


async def results(client, file_id):
    """Return the lines of a file by custom_id, each of which must be there once."""
    if file_id is None:
        return {}
    lines = [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]
    by_id = {one["custom_id"]: one for one in lines}
    assert len(by_id) == len(lines)
    assert len({one["id"] for one in lines}) == len(lines)
    return by_id


async def test_a_file_comes_back(client, tmp_path):
    content = os.urandom(3 * upload.PIECE_BYTES)
    file = await uploaded(client, content, "../../etc/pässwd")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "../../etc/pässwd", "batch")
    assert (await client.files.retrieve(file.id)).to_dict() == file.to_dict()
    answer = await client.files.content(file.id)
    assert answer.content == content
    assert answer.response.headers["content-disposition"].startswith("attachment")
    assert [entry.name for entry in (tmp_path / "batches" / "files").iterdir()] == [file.id]
    assert (tmp_path / "batches").stat().st_mode & 0o077 == 0
    assert (await client.files.delete(file.id)).deleted
    assert not list((tmp_path / "batches" / "files").iterdir())
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)


async def test_what_has_no_effect_on_a_file_is_named(llm, client, tmp_path):
    fields = {"anchor": "created_at", "seconds": 3600}
    create = client.files.with_raw_response.create
    answer = await create(file=b"x", purpose="batch", expires_after=fields)
    assert answer.headers[HEADER] == "expires_after"
    answer = await create(file=b"x", purpose="batch", extra_body={"colour": "red"})
    assert answer.headers[HEADER] == "colour"
    assert HEADER not in (await create(file=b"x", purpose="batch")).headers
    async with serving(llm, tmp_path, strict=True) as strict:
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await strict.files.create(file=b"x", purpose="batch", expires_after=fields)
        assert not list((tmp_path / "files").iterdir())


async def test_each_request_is_in_the_access_log(llm, tmp_path, monkeypatch):
    with logged(monkeypatch) as log:
        async with serving(llm, tmp_path, log=log.log) as client:
            wrong = line("b", prompt="Hi", top_p=7)
            batch = await ended(client, (await begun(client, line("a"), wrong)).id)
            [answer] = (await results(client, batch.output_file_id)).values()
            [error] = (await results(client, batch.error_file_id)).values()
        entries = {one["request_id"]: one for one in log.entries if one["client"] == "batch"}
        assert entries.keys() == {one["response"]["request_id"] for one in (answer, error)}
        served, refused = (entries[one["response"]["request_id"]] for one in (answer, error))
        assert (served["path"], served["status"]) == (COMPLETIONS, 200)
        assert served["completion_tokens"] == answer["response"]["body"]["usage"]["completion_tokens"]
        assert (refused["status"], refused["error"]) == (400, "invalid_request_error:top_p")


async def test_lists_come_in_pages(client):
    files = [(await uploaded(client, b"x", f"{number}")).id for number in range(5)]
    for order, expected in (("asc", files), ("desc", files[::-1])):
        page = await client.files.list(limit=2, order=order, purpose="batch")
        assert ([file.id for file in page.data], page.has_more) == (expected[:2], True)
        assert [file.id async for file in page] == expected
    assert (await client.files.list(purpose="batch_output")).data == []
    batches = [(await begun(client, line("a"))).id for _ in range(3)]
    page = await client.batches.list(limit=2)
    assert [batch.id async for batch in page] == batches[::-1]
    for call in (client.files.list, client.batches.list):
        with pytest.raises(openai.NotFoundError, match="gone"):
            await call(after="gone")


def multipart(*parts, boundary="xx"):
    pieces = []
    for headers, content in parts:
        pieces += [f"--{boundary}\r\n".encode(), headers, b"\r\n\r\n", content, b"\r\n"]
    return b"".join([*pieces, f"--{boundary}--\r\n".encode()])


NAMED = 'Content-Disposition: form-data; name="{}"'
FILE = NAMED.format('file"; filename="a').encode(), b"{}\n"
PURPOSE = NAMED.format("purpose").encode(), b"batch"
FORMS = {
    "no file": (multipart(PURPOSE), 400, "file is missing"),
    "no purpose": (multipart(FILE), 400, "must be 'batch'"),
    "another purpose": (multipart((PURPOSE[0], b"vision"), FILE), 400, "vision"),
    "two files": (multipart(FILE, FILE, PURPOSE), 400, "two files"),
    "many parts": (multipart(*[PURPOSE] * 20, FILE), 400, "more than 16 parts"),
    "a long field": (multipart((PURPOSE[0], b"x" * 5000), FILE), 400, "more than 1024 bytes"),
    "a long header": (multipart((b"X: " + b"x" * 9000, b""), FILE), 400, "not valid"),
    "not closed": (multipart(PURPOSE, FILE)[:-10], 400, "ends before"),
    "garbage": (b"garbage", 400, "not valid"),
    "nothing": (b"", 400, "file is missing"),
    "too large": (multipart(PURPOSE, (FILE[0], b"x" * 2000)), 413, "max_file_bytes"),
}


@pytest.mark.parametrize("form", FORMS)
async def test_an_upload_that_is_refused_leaves_nothing(llm, tmp_path, form):
    body, status, message = FORMS[form]
    async with serving(llm, tmp_path, max_file_bytes=1000) as client:
        headers = {"Content-Type": "multipart/form-data; boundary=xx"}
        answer = await client._client.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]
        assert not list((tmp_path / "files").iterdir())
        assert (await client.files.list()).data == []
        assert (await uploaded(client, b"x" * 1000)).bytes == 1000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Type": "multipart/form-data"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=" + "x" * 999}, 400),
        ({"Content-Type": "multipart/form-data; boundary=xx", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=xx", "Content-Length": "9" * 30}, 413),
    ],
    ids=["json", "no boundary", "a long boundary", "gzip", "a length that is too large"],
)
async def test_bodies_that_are_no_forms(client, headers, status):
    answer = await client._client.post("/v1/files", content=b"", headers=headers)
    assert answer.status_code == status


async def test_a_full_disk_leaves_nothing(client, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(upload.os, name, full)
            with pytest.raises(openai.InternalServerError, match="batch_dir is full") as caught:
                await uploaded(client, b"x" * 1000)
        assert caught.value.status_code == 507
        assert not list((tmp_path / "batches" / "files").iterdir())
    await uploaded(client, b"x" * 1000)


async def test_a_client_that_leaves_within_an_upload(client, tmp_path):
    head = multipart(PURPOSE, (FILE[0], b"x" * upload.PIECE_BYTES))[:-10]
    messages = [
        {"type": "http.request", "body": head, "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/files",
        "raw_path": b"/v1/files", "query_string": b"", "headers": [
            (b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=xx"),
        ],
    }  # fmt: skip
    await client.app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert not list((tmp_path / "batches" / "files").iterdir())
    assert client.app.state.batches.stored.has_room("", BatchConfig().max_stored_file_bytes)


async def test_files_are_bounded(llm, tmp_path, monkeypatch):
    async with serving(llm, tmp_path, max_stored_file_bytes=1000) as client:
        first = await uploaded(client, b"x" * 600)
        with pytest.raises(openai.APIStatusError, match="max_stored_file_bytes") as caught:
            await uploaded(client, b"x" * 600)
        assert caught.value.status_code == 413
        await client.files.delete(first.id)
        await uploaded(client, b"x" * 600)
    async with serving(llm, tmp_path, max_stored_file_bytes=1000) as client:
        with pytest.raises(openai.APIStatusError, match="max_stored_file_bytes"):
            await uploaded(client, b"x" * 600)
        monkeypatch.setattr(handlers, "MAX_FILES", 1)
        with pytest.raises(openai.ConflictError, match="1 files"):
            await uploaded(client, b"x")
        monkeypatch.setattr(handlers, "MAX_UPLOADS", 0)
        with pytest.raises(openai.RateLimitError):
            await uploaded(client, b"x")
    assert len(list((tmp_path / "files").iterdir())) == 1


async def test_every_request_is_answered(client, llm):
    lines = [line(f"{number}", prompt=f"Line {number}", max_tokens=number + 1) for number in range(7)]
    lines.insert(3, b"  ")
    batch = await begun(client, *lines, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, COMPLETIONS)
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 7, "completed": 7, "failed": 0}
    assert batch.error_file_id is batch.errors is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 86400
    output = await results(client, batch.output_file_id)
    texts = {key: one["response"]["body"]["choices"][0]["text"] for key, one in output.items()}
    assert texts == {f"{number}": llm.reply[: number + 1] for number in range(7)}
    assert all(one["error"] is None and one["response"]["status_code"] == 200 for one in output.values())
    assert len({one["response"]["request_id"] for one in output.values()}) == 7
    assert {seen.options["priority"] for seen in llm.seen} == {LOWEST_PRIORITY}
    file = await client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.output_file_id}.jsonl")
    await client.files.delete(batch.output_file_id)


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, "chat.completion"),
        (RESPONSES, {"input": "Hi"}, "response"),
    ],
)
async def test_every_endpoint(client, endpoint, body, answer):
    batch = await ended(client, (await begun(client, line("a", endpoint, **body), endpoint=endpoint)).id)
    output = await results(client, batch.output_file_id)
    assert output["a"]["response"]["body"]["object"] == answer


async def test_requests_that_fail_are_in_the_error_file(client):
    batch = await begun(
        client,
        line("good"),
        line("streams", prompt="Hi", stream=True),
        line("no prompt", prompt=""),
        line("broken", prompt="fail"),
        line("elsewhere", prompt="Hi", model="other"),
        line("typo", prompt="Hi", max_token=3),
    )
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 6, "completed": 1, "failed": 5}
    assert set(await results(client, batch.output_file_id)) == {"good"}
    errors = await results(client, batch.error_file_id)
    assert {key: one["response"]["status_code"] for key, one in errors.items()} == {
        "streams": 400, "no prompt": 400, "broken": 500, "elsewhere": 404, "typo": 400,
    }  # fmt: skip
    assert "answered whole" in errors["streams"]["response"]["body"]["error"]["message"]
    background = line("a", RESPONSES, input="Hi", background=True)
    batch = await ended(client, (await begun(client, background, endpoint=RESPONSES)).id)
    [error] = (await results(client, batch.error_file_id)).values()
    assert error["response"]["body"]["error"]["param"] == "background"


INVALID = {
    "not json": (b"{", "invalid_json_line", None),
    "not utf-8": (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    "deep": (b'{"a": ' * 100_000, "invalid_json_line", None),
    "a list": (b"[]", "invalid_request", None),
    "no id": ({"method": "POST", "url": COMPLETIONS, "body": {}}, "invalid_request", None),
    "an empty id": (line(""), "invalid_request", "custom_id"),
    "an id that is a number": (line(7), "invalid_request", "custom_id"),
    "another method": ({**line("a"), "method": "GET"}, "invalid_request", "method"),
    "another endpoint": (line("a", CHAT), "mismatched_endpoint", "url"),
    "a body that is a string": ({**line("a"), "body": "Hi"}, "invalid_request", "body"),
    "an id twice": (line("first"), "duplicate_custom_id", "custom_id"),
    "too long": (line("a", prompt="x" * 5_000_000), "line_too_long", None),
}


@pytest.mark.parametrize("problem", INVALID)
async def test_an_invalid_line_fails_the_batch(client, llm, problem):
    bad, code, param = INVALID[problem]
    batch = await ended(client, (await begun(client, line("first"), bad, line("last"))).id)
    assert (batch.status, batch.output_file_id, len(llm.seen)) == ("failed", None, 0)
    [error] = batch.errors.data
    assert (error.line, error.code, error.param) == (2, code, param)


async def test_inputs_with_too_much_or_nothing(client, monkeypatch):
    batch = await ended(client, (await begun(client, b"")).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
    monkeypatch.setattr(input_lines, "MAX_ERRORS", 3)
    batch = await ended(client, (await begun(client, *[b"{"] * 10)).id)
    assert len(batch.errors.data) == 3
    monkeypatch.setattr(input_lines, "MAX_LINES", 2)
    batch = await ended(client, (await begun(client, *(line(f"{number}") for number in range(5)))).id)
    assert [error.code for error in batch.errors.data] == ["too_many_requests"]


@pytest.mark.parametrize(
    "fields",
    [{"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"metadata": {"a": "b" * 600}}],
    ids=["an endpoint", "a window", "metadata"],
)
async def test_batches_that_are_refused(client, fields):
    file = await uploaded(client, jsonl(line("a")))
    given = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
        await client.batches.create(**given)


async def test_inputs_that_cannot_be_used(client):
    batch = await ended(client, (await begun(client, line("a"))).id)
    fields = {"endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        await client.batches.create(input_file_id=batch.output_file_id, **fields)
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id="../lock", **fields)
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call("batch_x")
    with pytest.raises(openai.ConflictError, match="completed already"):
        await client.batches.cancel(batch.id)


async def test_a_batch_that_is_cancelled(client, llm):
    lines = [line("done"), *(line(f"{number}", prompt="hold") for number in range(4))]
    first = await begun(client, *lines)
    waiting = await begun(client, line("a"))
    await llm.held.wait()
    assert (await until(client, waiting.id, "in_progress")).request_counts.completed == 0
    with pytest.raises(openai.ConflictError):
        await client.files.delete(first.input_file_id)
    assert (await client.batches.cancel(waiting.id)).status == "cancelling"
    assert (await ended(client, waiting.id)).status == "cancelled"
    assert (await client.batches.cancel(first.id)).status == "cancelling"
    batch = await ended(client, first.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    assert batch.request_counts.to_dict() == {"total": 5, "completed": 1, "failed": 4}
    assert set(await results(client, batch.output_file_id)) == {"done"}
    errors = await results(client, batch.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert not llm.live
    await client.files.delete(first.input_file_id)


async def test_a_batch_whose_time_is_over(client, llm, monkeypatch):
    monkeypatch.setattr(handlers, "COMPLETION_WINDOW", 0)
    batch = await ended(client, (await begun(client, line("a"), line("b", prompt="hold"))).id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    errors = await results(client, batch.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}


async def test_at_most_so_many_are_served_at_once(client, llm):
    batch = await begun(client, *(line(f"{number}", prompt="hold") for number in range(5)))
    await llm.held.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(llm.live) == 2
    await client.batches.cancel(batch.id)
    await ended(client, batch.id)


async def test_what_the_engine_has_no_room_for_is_sent_again(client, llm, monkeypatch):
    waits = []
    sleep = asyncio.sleep

    async def at_once(seconds):
        if seconds:  # the engine's are 0
            waits.append(seconds)
        if len(waits) == 4:
            llm.dead = None
        await sleep(0)

    monkeypatch.setattr(job.asyncio, "sleep", at_once)
    llm.dead = "for a while"
    batch = await begun(client, line("a"))
    while len(waits) < 4:
        await sleep(0)
    batch = await client.batches.retrieve(batch.id)
    while batch.status != "completed":
        await sleep(0.001)
        batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts.completed == 1
    assert all(0.5 * 2**number <= wait <= 0.75 * 2**number for number, wait in enumerate(waits))


async def test_answers_beyond_the_limit_of_stored_bytes_are_errors(llm, tmp_path):
    async with serving(llm, tmp_path, max_stored_file_bytes=2000) as client:
        lines = [line("a", prompt="Hi", max_tokens=200, logprobs=5), line("b", prompt="Hi")]
        batch = await ended(client, (await begun(client, *lines)).id)
        assert set(await results(client, batch.output_file_id)) == {"b"}
        errors = await results(client, batch.error_file_id)
        assert errors["a"]["error"]["code"] == "storage_limit_exceeded"


async def test_batches_are_bounded(client, llm, monkeypatch):
    monkeypatch.setattr(service, "MAX_UNFINISHED", 1)
    held = await begun(client, line("a", prompt="hold"))
    with pytest.raises(openai.RateLimitError, match="limit"):
        await begun(client, line("a"))
    await client.batches.cancel(held.id)
    await ended(client, held.id)
    monkeypatch.setattr(records, "MAX_BATCHES", 2)
    batches = []
    for _ in range(3):
        batches.append((await begun(client, line("a"))).id)
        await ended(client, batches[-1])
    assert [batch.id async for batch in await client.batches.list()] == batches[:0:-1]


async def test_a_server_without_a_directory(http):
    for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x", "/v1/files/x/content"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_batches")
        assert "--batch-dir" in answer.json()["error"]["message"]


async def test_a_directory_belongs_to_one_server(tmp_path):
    first = BatchDirectory(str(tmp_path / "a" / "b"))
    with pytest.raises(ConfigError, match="another server"):
        BatchDirectory(str(tmp_path / "a" / "b"))
    first.close()
    BatchDirectory(str(tmp_path / "a" / "b")).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="batch_dir"):
        BatchDirectory(str(tmp_path / "file"))


async def test_ids_tell_their_directory_also_after_a_restart(llm, tmp_path):
    ids = []
    for name in ("a", "b", "a"):
        async with serving(llm, tmp_path / name) as client:
            ids.append((await uploaded(client, b"x")).id)
    async with serving(llm, tmp_path / "a") as client:
        assert [file.id async for file in client.files.list(order="asc")] == ids[::2]
        await client.files.delete(ids[2])
        codes = {ids[1]: "kept_elsewhere", ids[2]: "file_not_found", "file-" + "g" * 32: "file_not_found"}
        for file_id, code in codes.items():
            with pytest.raises(openai.NotFoundError) as caught:
                await client.files.retrieve(file_id)
            assert caught.value.code == code
        with pytest.raises(openai.NotFoundError) as caught:
            await client.batches.retrieve(ids[1].replace("file-", "batch_"))
        assert caught.value.code == "kept_elsewhere"


KEYS = """
[tenants.a]
keys = ["key-a"]
[tenants.b]
keys = ["key-b"]
max_running_seqs = 1
"""


async def test_tenants_see_their_own(llm, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    (tmp_path / "keys.toml").chmod(0o600)
    config = ServerConfig(
        api_keys_file=str(tmp_path / "keys.toml"), batches=BatchConfig(batch_dir=str(tmp_path / "batches"))
    )
    app = create_app(llm, config)
    await start_state(app)
    transport = httpx.ASGITransport(app=app)
    a, b = (
        openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key=f"key-{name}",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        )
        for name in "ab"
    )
    batch = await begun(a, line("x"))
    batch = await ended(a, batch.id)
    other = await ended(b, (await begun(b, *(line(f"{number}") for number in range(4)))).id)
    assert (batch.request_counts.completed, other.request_counts.completed) == (1, 4)
    assert {seen.options["tenant"] for seen in llm.seen} == {"a", "b"}
    for call, theirs in [
        (b.files.retrieve, batch.output_file_id),
        (b.files.content, batch.output_file_id),
        (b.files.delete, batch.output_file_id),
        (b.batches.retrieve, batch.id),
        (b.batches.cancel, batch.id),
    ]:
        with pytest.raises(openai.NotFoundError):
            await call(theirs)
    assert [one.id for one in (await b.batches.list()).data] == [other.id]
    assert {one.id for one in (await b.files.list()).data} == {other.input_file_id, other.output_file_id}
    await close_state(app)


async def test_a_batch_goes_on_after_a_restart(llm, tmp_path):
    lines = [line(f"{number}") for number in range(6)]
    async with serving(llm, tmp_path, max_batch_requests=1) as client:
        batch = await begun(client, *lines, line("held", prompt="hold"), line("last"))
        await llm.held.wait()
        running = await client.batches.retrieve(batch.id)
        assert (running.status, running.request_counts.completed) == ("in_progress", 6)
        cancelled = await begun(client, line("a"))
        await until(client, cancelled.id, "in_progress")
    [output] = [one for one in (tmp_path / "files").iterdir() if one.name.endswith("-output")]
    whole = output.read_bytes()
    assert whole.count(b"\n") == 6
    output.write_bytes(whole[:-40])  # as a server that was killed, or a disk, may have left it
    (tmp_path / "files" / ("file-" + "0" * 32)).touch()  # an upload that was not complete
    (tmp_path / "files" / "mine").touch()
    llm.seen.clear()
    llm.held = asyncio.Event()
    async with serving(llm, tmp_path, max_batch_requests=1) as client:
        await llm.held.wait()
        assert [seen.prompt for seen in llm.seen] == ["Line 5", "hold"]
        names = {one.name for one in (tmp_path / "files").iterdir()}
        assert "mine" in names
        assert "file-" + "0" * 32 not in names
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch.id)
        output = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
        assert sorted(output) == [f"{number}" for number in range(6)]
        assert sorted(errors) == ["held", "last"]
        assert (await ended(client, cancelled.id)).status == "completed"
    async with serving(llm, tmp_path) as client:
        assert (await client.batches.retrieve(batch.id)).to_dict() == batch.to_dict()
        assert await results(client, batch.output_file_id) == output


async def test_a_batch_goes_on_when_the_disk_does(client, llm, monkeypatch):
    monkeypatch.setattr(job, "RESTART_DELAY", 0.0)
    append = ResultFile.append
    faults = [OSError(errno.ENOSPC, "No space left on device")] * 3

    def failing(self, encoded):
        if self.num_bytes and faults:
            os.pwrite(self._file, encoded[:10], self.num_bytes)
            raise faults.pop()
        append(self, encoded)

    monkeypatch.setattr(ResultFile, "append", failing)
    batch = await ended(client, (await begun(client, *(line(f"{number}") for number in range(6)))).id)
    assert not faults
    assert batch.request_counts.to_dict() == {"total": 6, "completed": 6, "failed": 0}
    assert len(await results(client, batch.output_file_id)) == 6
    used = client.app.state.batches.stored
    files = [file async for file in await client.files.list()]
    assert used.has_room("", used.limit - sum(file.bytes for file in files))
    assert not used.has_room("", used.limit - sum(file.bytes for file in files) + 1)


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = ResultFile(tmp_path / "a", "batch_req_x")
    pwrite = os.pwrite

    def short(descriptor, data, offset):
        if offset >= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, bytes(data[:5]), offset)

    file.append(b"a" * 9 + b"\n")
    monkeypatch.setattr("quire.server.batches.results.os.pwrite", short)
    with pytest.raises(OSError, match="No space"):
        file.append(b"b" * 20)
    assert (tmp_path / "a").read_bytes() == b"a" * 9 + b"\n"


WHOLE = b'{"id":"batch_req_x_1","custom_id":"a"}\n'


@pytest.mark.parametrize(
    "rest",
    [b"", b"\0" * 50, b'{"id":"batch_req_x_2",', b'{"id":"batch_req_y_2","custom_id":"b"}\n', b"[]\n", b"\n",
     WHOLE.replace(b"_1", b"_2")[:-1]],
    ids=["nothing", "zeros", "half a line", "another batch", "a list", "a blank line", "no line feed"],
)  # fmt: skip
def test_what_is_torn_is_cut_off(tmp_path, rest):
    (tmp_path / "a").write_bytes(WHOLE + rest)
    file = ResultFile(tmp_path / "a", "batch_req_x")
    assert list(file.resume()) == [1]
    assert (tmp_path / "a").read_bytes() == WHOLE
    assert file.num_bytes == len(WHOLE)


def test_the_check_of_an_input_is_bounded():
    check = InputCheck(COMPLETIONS, 1000)
    for number in range(1, 200):
        if check.is_over:
            break
        check.check(number, b"{")
    assert len(check.errors) == input_lines.MAX_ERRORS

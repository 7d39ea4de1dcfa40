"""/v1/requests: which calls are listed, under which names, and when the engine does not answer."""

from __future__ import annotations

import asyncio

from quire.server.control import live_requests as requests


async def held(http, llm, **fields) -> asyncio.Task:
    """Start a completion and return when the engine holds it."""
    llm.held.clear()
    headers = {"X-Request-Id": fields.pop("request_id")}
    body = {"model": "fake", "prompt": "hold", **fields}
    task = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
    await asyncio.wait_for(llm.held.wait(), 10)
    return task


async def release(llm, *tasks) -> None:
    for request_id in list(llm.live):
        llm.abort(request_id)
    await asyncio.gather(*tasks)


async def test_calls_are_listed_by_the_ids_of_their_answers(http, llm):
    first = await held(http, llm, request_id="z")
    second = await held(http, llm, request_id="a/0", prompt=["hold", "hold"])
    listed = (await http.get("/v1/requests")).json()
    assert listed["has_more"] is False
    assert [(one["id"], one["state"]) for one in listed["data"]] == [
        ("cmpl-z", ["running: cmpl-z/0"]),
        ("cmpl-a/0", ["running: cmpl-a/0/0", "running: cmpl-a/0/1"]),
    ]
    assert (await http.get("/v1/requests/cmpl-a/0")).json() == listed["data"][1]
    assert (await http.get("/v1/requests/cmpl-a")).status_code == 404
    await release(llm, first, second)
    assert (await http.get("/v1/requests/cmpl-z")).status_code == 404


async def test_a_call_with_an_id_in_use_leaves_the_first_one_listed(http, llm):
    first = await held(http, llm, request_id="same")
    response = await http.post(
        "/v1/completions", json={"model": "fake", "prompt": "Hi"}, headers={"X-Request-Id": "same"}
    )
    assert response.json()["error"]["code"] == "duplicate_request_id"
    assert (await http.get("/v1/requests/cmpl-same")).json()["state"] == ["running: cmpl-same/0"]
    await release(llm, first)


async def test_a_long_list_is_cut_off_and_says_so(http, llm, monkeypatch):
    monkeypatch.setattr(requests, "MAX_LISTED", 2)
    tasks = [await held(http, llm, request_id=str(number)) for number in range(3)]
    listed = (await http.get("/v1/requests")).json()
    assert [one["id"] for one in listed["data"]] == ["cmpl-0", "cmpl-1"]
    assert listed["has_more"] is True
    assert llm.explain_limit == requests.MAX_SENTENCES // 2
    assert (await http.get("/v1/requests/cmpl-0")).status_code == 200
    assert llm.explain_limit == requests.MAX_SENTENCES
    await release(llm, *tasks)


async def test_an_engine_that_does_not_answer(http, llm, monkeypatch):
    task = await held(http, llm, request_id="one")
    monkeypatch.setattr(requests, "ENGINE_TIMEOUT", 0.0)
    llm.is_silent = True
    for path in ("/v1/requests", "/v1/requests/cmpl-one"):
        response = await http.get(path)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "engine_timeout"
    await release(llm, task)


async def test_a_request_is_aborted_and_its_client_told(http, llm):
    first = await held(http, llm, request_id="a", prompt=["hold", "hold"])
    second = await held(http, llm, request_id="b")
    aborted = await http.delete("/v1/requests/cmpl-a")
    assert aborted.json() == {"id": "cmpl-a", "object": "request", "aborted": True}
    answer = await first
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "aborted")
    assert [one["id"] for one in (await http.get("/v1/requests")).json()["data"]] == ["cmpl-b"]
    assert (await http.delete("/v1/requests/cmpl-a")).status_code == 404
    await release(llm, second)
    assert (await second).status_code == 503, "another end than by a client's wish may be tried again"


async def test_a_stream_ends_with_the_abort(http, llm):
    task = await held(http, llm, request_id="s", stream=True)
    assert (await http.delete("/v1/requests/cmpl-s")).status_code == 200
    lines = (await task).text.splitlines()
    assert '"code":"aborted"' in lines[-2]


async def test_kv_that_no_peer_will_read_is_released(http, llm):
    released = await http.delete("/v1/kv_transfers/a%2Fb")
    assert released.json() == {"id": "a/b", "object": "kv_transfer", "released": True}
    assert llm.released == ["a/b"]
    for invalid in ("x" * 129, "%2F", "a%20b", "%00", "%FF"):
        response = await http.delete(f"/v1/kv_transfers/{invalid}")
        message = response.json()["error"]["message"]
        assert (response.status_code, "transfer_id is invalid" in message) == (400, True)
    llm.info.kv_transfer_address = None
    response = await http.delete("/v1/kv_transfers/a")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "kv_transfer_not_found")
    assert llm.released == ["a/b"]


async def test_the_prefix_cache_is_reset_unless_in_use(http, llm):
    assert (await http.post("/reset_prefix_cache")).json() == {"reset": True}
    task = await held(http, llm, request_id="one")
    response = await http.post("/reset_prefix_cache")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "prefix_cache_in_use")
    await release(llm, task)
    llm.dead = "gone"
    assert (await http.post("/reset_prefix_cache")).status_code == 503

import httpx
import pytest

from quire.config import ServerConfig
from quire.server.app import create_app


@pytest.fixture
async def control(llm):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(engine_control=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_pause_and_resume(control, llm):
    assert (await control.get("/is_paused")).json() == {"is_paused": False}
    answer = await control.post("/pause")
    assert answer.json() == {"is_paused": True, "is_cache_cleared": True}
    assert llm.paused == "abort"
    answer = await control.post("/pause?mode=wait&clear_cache=false")
    assert answer.json() == {"is_paused": True, "is_cache_cleared": False}
    assert llm.paused == "wait"
    assert (await control.get("/is_paused")).json() == {"is_paused": True}
    assert (await control.post("/resume")).json() == {"is_paused": False}
    assert llm.paused is None


async def test_sleep_and_wake_up(control, llm):
    assert (await control.post("/sleep?level=2&mode=keep")).json() == {"is_sleeping": True}
    assert llm.asleep == "keep"
    assert (await control.get("/is_sleeping")).json() == {"is_sleeping": True}
    health = await control.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "asleep; wake it")
    assert (await control.get("/live")).status_code == 200
    assert (await control.post("/reset_prefix_cache")).json()["error"]["code"] == "engine_asleep"
    assert (await control.post("/wake_up")).json() == {"is_sleeping": False}
    assert (await control.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("url", "param", "message"),
    [
        ("/pause?mode=stop", "mode", "'abort', 'wait' or 'keep'"),
        ("/pause?clear_cache=perhaps", "clear_cache", "boolean"),
        ("/pause?clear_cash=1", "clear_cash", "did you mean 'clear_cache'"),
        ("/sleep?level=3", "level", "'1' or '2'"),
    ],
)
async def test_a_wrong_query_is_refused(control, llm, url, param, message):
    answer = await control.post(url)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert llm.paused is None
    assert llm.asleep is None


@pytest.mark.parametrize("path", ["/pause", "/resume", "/sleep", "/wake_up"])
async def test_nobody_stops_an_engine_that_is_not_to_be_controlled(http, llm, path):
    answer = await http.post(path)
    assert answer.status_code == 403
    assert "--engine-control" in answer.json()["error"]["message"]
    assert llm.paused is None
    assert llm.asleep is None

import httpx
import pytest

from quire.config import ServerConfig
from quire.server.app import create_app

PROMPT = "abc"  # and a token before it


@pytest.fixture
async def limited(llm):
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(max_logprobs_per_request=60)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_tokens": 20, "logprobs": 2}, 60),
        ({"max_tokens": 21, "logprobs": 2}, 63),
        ({"max_tokens": 10, "logprobs": 1, "n": 3}, 60),
        ({"max_tokens": 10, "logprobs": 1, "n": 3, "best_of": 4}, 80),
        ({"max_tokens": 61, "logprobs": 0}, 61),
        ({"max_tokens": 1, "prompt_logprobs": 14}, 60),
        ({"max_tokens": 1, "prompt_logprobs": 15}, 64),
        ({"max_tokens": 15, "logprobs": 1, "prompt": [PROMPT, PROMPT]}, 60),
        ({"max_tokens": 16, "logprobs": 1, "prompt": [PROMPT, PROMPT]}, 64),
        ({"max_tokens": 200}, 0),
    ],
)
async def test_the_log_probabilities_of_all_prompts_and_completions_count(limited, llm, fields, count):
    answer = await limited.post("/v1/completions", json={"model": "fake", "prompt": PROMPT, **fields})
    if count <= 60:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "logprobs")
    assert f"{count} log-probabilities" in error["message"]
    assert "max_logprobs_per_request" in error["message"]
    assert not llm.live


async def test_chat_has_the_same_limit(limited):
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    answer = await limited.post("/v1/chat/completions", json=body | {"top_logprobs": 2, "max_tokens": 21})
    assert answer.status_code == 400
    answer = await limited.post("/v1/chat/completions", json=body | {"top_logprobs": 2, "max_tokens": 20})
    assert answer.status_code == 200

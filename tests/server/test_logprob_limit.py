import httpx
import pytest

from quire import SamplingParams
from quire.config import ServerConfig
from quire.engine.messages import EngineInfo
from quire.front.text.input_processor import InputProcessor
from quire.server.app import create_app
from quire.server.calls.logprobs import LogprobLimit
from tokenizers_for_tests import byte_level

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


@pytest.mark.parametrize("fields", [{"best_of": 9}, {"beam_width": 9}])
def test_those_that_nobody_has_asked_for_do_not_count(fields):
    info = EngineInfo(
        model="test", max_model_len=20, vocab_size=300, num_blocks=10, block_size=16, kv_cache_bytes=0,
        dtype="float32", load_seconds=0.0,
    )  # fmt: skip
    inputs = InputProcessor(byte_level(eos_token_ids=(1,)), info)
    processed = inputs.process(PROMPT, SamplingParams(max_tokens=10, **fields))
    assert processed.core_request.sampling_params.logprobs is not None, "ranking needs some"
    LogprobLimit(60).admit(processed)


async def test_chat_has_the_same_limit(limited):
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    answer = await limited.post("/v1/chat/completions", json=body | {"top_logprobs": 2, "max_tokens": 21})
    assert answer.status_code == 400
    answer = await limited.post("/v1/chat/completions", json=body | {"top_logprobs": 2, "max_tokens": 20})
    assert answer.status_code == 200

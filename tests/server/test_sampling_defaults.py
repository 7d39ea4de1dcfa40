"""What requests leave out is as the model's generation_config.json has it, as another, or as a flag says."""

import json

import httpx
import pytest

from quire.config import ServerConfig
from quire.errors import ConfigError, ModelError
from quire.sampling_params import SamplingParams
from quire.server.app import create_app
from quire.server.sampling_defaults import read_sampling_defaults

QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "max_new_tokens": 99,
    "min_p": None,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 7},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 7},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 7},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 7},
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    return tmp_path


def read(model, **fields):
    return read_sampling_defaults(ServerConfig(**fields), model)


def test_the_models_file_counts(model):
    expected = SamplingParams(max_tokens=99, repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8)
    assert read(model).params({}) == expected
    assert read(model / "weights.gguf").params({}) == expected
    assert read(model).params({"temperature": 0.0}).temperature == 0.0


def test_none_and_another_file(model, tmp_path):
    assert read(model, generation_config="vllm").params({}) == SamplingParams()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert read(empty).params({}) == SamplingParams()
    assert read(empty, generation_config=str(model)).params({}).top_k == 20


def test_overrides_win(model):
    defaults = read(model, override_generation_config={"temperature": 0.1, "top_k": -1})
    assert (defaults.params({}).temperature, defaults.params({}).top_k) == (0.1, 0)
    assert (
        str(read(model, generation_config="vllm", override_generation_config={"top_p": 0.5})) == "top_p 0.5"
    )


def test_beam_search_does_not_sample(model):
    assert read(model).params({"beam_width": 2}) == SamplingParams(max_tokens=99, beam_width=2)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"generation_config": "/no/such"}, "not a directory with a generation_config.json"),
        ({"override_generation_config": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"override_generation_config": {"top_p": 7}}, "top_p is 7; it must be"),
        ({"override_generation_config": {"top_k": 0.5}}, "top_k is 0.5; it must be"),
    ],
    ids=["directory", "name", "range", "type"],
)
def test_a_flag_that_cannot_be_used_is_refused(fields, refusal, model):
    with pytest.raises(ConfigError, match=refusal):
        read(model, **fields)


@pytest.mark.parametrize("value", ["hot", True, -1, [0.5]])
def test_a_wrong_value_of_the_file_names_file_and_key(value, model):
    (model / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(
        ModelError, match=r"generation_config\.json: temperature is .*generation_config to 'vllm'"
    ):
        read(model)
    assert read(model, generation_config="vllm").params({}) == SamplingParams()


@pytest.mark.parametrize("path", CALLS)
async def test_every_api_has_the_defaults(path, model, llm):
    llm.model_path = model
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answer = await http.post(path, json={"model": "fake", "top_p": 0.25, **CALLS[path]})
    assert answer.status_code == 200, answer.text
    params = llm.seen[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.7, 20, 1.05)
    assert (params.top_p, params.max_tokens) == (0.25, 7)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_default_that_does_not_fit_is_as_many_as_fit_on_a_strict_server_too(path, model, llm):
    """What the client has not asked for is no reason to refuse its request."""
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2048}))
    llm.model_path = model
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(strict=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {name: value for name, value in CALLS[path].items() if "tokens" not in name}
        answer = await http.post(path, json={"model": "fake", **body})
        assert answer.status_code == 200, answer.text
        assert llm.seen[-1].options["shorten_output"]
        await http.post(path, json={"model": "fake", **CALLS[path]})
    assert "shorten_output" not in llm.seen[-1].options

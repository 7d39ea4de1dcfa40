"""`kv_transfer_params` on the way to the KV connector, and what that returns on the way back."""

from __future__ import annotations

import pytest

from memory_connector import MemoryConnector
from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError

PROMPT = list(range(100, 140))
OPTIONS = {"num_threads": 1, "num_kv_blocks": 64}

pytestmark = pytest.mark.usefixtures("preloaded_engines")


class EchoingConnector(MemoryConnector):
    """Returns what a request came with, and the request's blocks."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, send_steps=1)

    def request_finished(self, request, block_ids):
        is_held, params = super().request_finished(request, block_ids)
        return is_held, None if params is None else {**params, "given": request.kv_transfer_params}


def returned(llm: LLM, *, given, max_tokens=2, **params) -> object:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)
    [output] = llm.generate([PROMPT], sampling, kv_transfer_params=given)
    return output.kv_transfer_params


@pytest.mark.parametrize("engine_process", [False, True])
def test_a_request_and_its_output_carry_them(engine_process):
    name = "test_kv_transfer_params.EchoingConnector"
    with LLM("mini", kv_connector=name, engine_process=engine_process, **OPTIONS) as llm:
        given = {"do_remote_decode": True, "remote_port": 7000, "transfer_id": "é" * 256}
        params = returned(llm, given=given)
        assert params["given"] == given
        assert len(params["block_ids"]) == 3
        assert returned(llm, given=None)["given"] is None
        assert returned(llm, given=given, n=3)["given"] == given
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        stop = [output.outputs[0].text]
        assert returned(llm, given=given, max_tokens=1, stop=stop)["given"] == given, "ended by the front"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 1.5}, "at most 16 names"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\ud800": 1}, "lone surrogate"),
    ],
)
def test_what_cannot_be_sent_is_refused(given, message):
    with LLM("mini", **OPTIONS) as llm, pytest.raises(InvalidRequestError, match=message) as refused:
        llm.generate("a", kv_transfer_params=given)
    assert refused.value.param == "kv_transfer_params"


def test_without_a_connector_there_is_nothing_to_return():
    with LLM("mini", **OPTIONS) as llm:
        assert returned(llm, given={"do_remote_decode": True}) is None

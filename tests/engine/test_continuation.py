"""A request that continues where an engine died goes on with the same tokens and log-probabilities."""

from __future__ import annotations

import pytest

from engine_checks import TINY, check_after_every_step, core_of
from quire import LLM, SamplingParams
from quire.engine.messages import EngineCoreRequest
from quire.errors import QueueFullError
from quire.status import RequestStatus
from quire.structured_outputs import StructuredOutputsParams

PROMPT = list(range(5, 48))
KINDS = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 1},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "constraints": {
        "temperature": 0.9,
        "min_tokens": 18,
        "bad_words_token_ids": ((7, 9), (300,)),
        "logit_bias": {11: 3.0},
    },
    "allowed": {"temperature": 0.9, "allowed_token_ids": (7, 9, 11, 40), "bad_words_token_ids": ((7, 9),)},
    "grammar": {"temperature": 0.9, "structured_outputs": StructuredOutputsParams(regex="[ab]{15,40}")},
}


@pytest.fixture(scope="module", params=[{}, {"speculative_method": "ngram"}, {"overlap_steps": True}])
def llm(request, checkpoint):
    with LLM(checkpoint, **TINY, max_num_batched_tokens=24, **request.param) as llm:
        check_after_every_step(core_of(llm))
        yield llm


def request_of(params: dict, *, n: int = 1, **more) -> EngineCoreRequest:
    return EngineCoreRequest(
        sequence_ids=[f"s{index}" for index in range(n)],
        seeds=[100 + index for index in range(n)],
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(n=n, seed=100, max_tokens=24, **params),
        **more,
    )


def run(llm, request: EngineCoreRequest) -> dict[str, tuple]:
    """Return the tokens, log-probabilities and end of each sequence, and what of the prompt was cached."""
    core = core_of(llm)
    core.reset_prefix_cache()
    core.add(request)
    tokens = {name: [] for name in request.sequence_ids}
    logprobs = {name: [] for name in request.sequence_ids}
    ends, cached = {}, 0
    while core.has_requests():
        outputs, _ = core.step()
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
            logprobs[output.request_id] += output.logprobs or []
            cached = max(cached, output.num_cached_tokens)
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error)
    return {name: (tokens[name], logprobs[name], ends[name], cached) for name in tokens}


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_nothing_had_happened(llm, kind):
    whole = request_of(KINDS[kind], n=3)
    expected = run(llm, whole)
    # One sequence had ended, one had just begun, one had come far.
    cuts = {"s0": 1, "s2": 13}
    outputs = [expected[name][0][:cut] for name, cut in cuts.items()]
    rest = run(llm, resumed(whole, [0, 2], outputs))
    for name, cut in cuts.items():
        tokens, logprobs, end, _ = expected[name]
        assert rest[name] == (tokens[cut:], logprobs[cut:], end, 0)


def resumed(request: EngineCoreRequest, indices, outputs, *, was_accepted=True) -> EngineCoreRequest:
    return EngineCoreRequest(
        [request.sequence_ids[index] for index in indices],
        [request.seeds[index] for index in indices],
        request.prompt_token_ids,
        request.sampling_params,
        resumed_outputs=outputs,
        was_accepted=was_accepted,
    )


@pytest.mark.formats
@pytest.mark.first_case
def test_a_beam_search_begins_anew(llm):
    params = {"beam_width": 3, "logprobs": 3, "temperature": 0.0}
    whole = request_of(params, n=2)
    expected = run(llm, whole)
    assert run(llm, resumed(whole, [0, 1], [[], []])) == expected


@pytest.mark.formats
@pytest.mark.first_case
def test_a_full_queue_takes_it_all_the_same_if_it_was_accepted(llm):
    core = core_of(llm)
    limit = llm.config.scheduler.max_num_queued_reqs
    for index in range(limit):
        core.add(EngineCoreRequest([f"q{index}"], [1], [5], SamplingParams(max_tokens=1, seed=1)))
    late = EngineCoreRequest(["late"], [1], [5], SamplingParams(max_tokens=1, seed=1))
    with pytest.raises(QueueFullError):
        core.add(late)
    with pytest.raises(QueueFullError):  # another server's engine has begun it
        core.add(resumed(late, [0], [[]], was_accepted=False))
    core.add(resumed(late, [0], [[]]))
    ended = core.finish(None, RequestStatus.FINISHED_ABORTED)
    assert len(ended) == limit + 1
    while core.has_requests():
        core.step()

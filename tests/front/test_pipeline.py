"""`ContinuousBatchingPipeline` against `LLM`: the same tokens, and no state left behind by errors."""

from __future__ import annotations

import concurrent.futures
import signal
import sys

import pytest

from engine_checks import check_after_every_step, core_of, requests_of
from quire import LLM, ContinuousBatchingPipeline, GenerationConfig, SamplingParams, SchedulerConfig
from quire.errors import ConfigError, DuplicateRequestError, InvalidRequestError
from quire.front.openvino.results import GenerationFinishReason, GenerationStatus
from quire.status import FinishReason

SCHEDULER = SchedulerConfig(num_kv_blocks=64, max_num_batched_tokens=32, max_num_seqs=8)


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    pipeline = ContinuousBatchingPipeline(checkpoint, SCHEDULER, "CPU", {"num_threads": 1})
    check_after_every_step(core_of(pipeline))
    return pipeline


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, num_threads=1, num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(pipeline):
    yield
    assert not pipeline.has_non_finished_requests()
    pipeline.step()
    assert pipeline.get_metrics().cache_usage == 0
    assert pipeline.generate([], []) == [], "a conversation is open"


def config(**fields) -> GenerationConfig:
    plain = {"max_new_tokens": 10, "ignore_eos": True, "apply_chat_template": False}
    return GenerationConfig(**{**plain, **fields})


def run(pipeline) -> None:
    while pipeline.has_non_finished_requests():
        pipeline.step()


def test_generate_equals_llm(pipeline, llm):
    prompts = ["the", "a cache " * 20, "keys"]
    results = pipeline.generate(prompts, config())
    expected = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True))
    assert [result.texts for result in results] == [[output.outputs[0].text] for output in expected]
    assert all(result.status is GenerationStatus.FINISHED for result in results)
    assert all(result.finish_reasons == [FinishReason.LENGTH] for result in results)


def test_sampling_equals_llm(pipeline, llm):
    fields = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1}
    (result,) = pipeline.generate("the", config(do_sample=True, rng_seed=5, num_return_sequences=3, **fields))
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True, **fields)
    assert result.texts == [one.text for one in llm.generate("the", params)[0].outputs]


def test_requests_step_by_step(pipeline, llm):
    first = pipeline.add_request(0, "the", config(max_new_tokens=4, logprobs=1))
    assert first.get_status() is GenerationStatus.RUNNING
    assert not first.can_read()
    assert first.read() == {}
    pipeline.step()
    second = pipeline.add_request(1, pipeline.get_tokenizer().encode("the"), config(max_new_tokens=6))
    assert first.can_read()
    read = first.read()[0].generated_ids
    assert len(read) == 1
    while first.get_status() is GenerationStatus.RUNNING:
        pipeline.step()
        read += [token for output in first.read().values() for token in output.generated_ids]
    run(pipeline)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    expected = llm.generate("the", params)[0].outputs[0].token_ids
    assert read == first.read_all()[0].generated_ids == expected[:4]
    assert second.read_all()[0].generated_ids == expected
    output = first.read_all()[0]
    assert len(output.generated_log_probs) == 4
    assert output.score == sum(output.generated_log_probs) < 0
    assert output.finish_reason is GenerationFinishReason.LENGTH
    assert second.read_all()[0].generated_log_probs == []


@pytest.mark.parametrize(
    ("end", "status", "kept"), [("stop", GenerationStatus.STOP, 1), ("cancel", GenerationStatus.CANCEL, 0)]
)
def test_ending_a_request_from_outside(pipeline, end, status, kept):
    handle = pipeline.add_request(3, "the", config(max_new_tokens=400))
    for _ in range(3):
        pipeline.step()
    getattr(handle, end)()
    assert handle.get_status() is status
    assert len(handle.read_all()) == kept
    assert handle.can_read() == bool(kept)
    getattr(handle, end)()
    assert not pipeline.has_non_finished_requests()
    pipeline.step()


def test_ctrl_c_loses_no_token_of_a_handle(pipeline, monkeypatch):
    apply, interrupted = requests_of(pipeline).outputs.apply, []

    def apply_interrupted(outputs):
        if len(interrupted) < 3 and outputs:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)
        return apply(outputs)

    expected = pipeline.generate("the cache", config())[0].texts
    monkeypatch.setattr(requests_of(pipeline).outputs, "apply", apply_interrupted)
    handle = pipeline.add_request(5, "the cache", config())
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            pipeline.step()
    run(pipeline)
    assert handle.get_status() is GenerationStatus.FINISHED
    (output,) = handle.read_all()
    assert [pipeline.get_tokenizer().decode(output.generated_ids)] == expected


def test_threads_add_requests_while_another_steps(pipeline):
    alone = pipeline.generate(["the", "keys"], config())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads that did not take turns would meet in most steps
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            added = [pool.submit(pipeline.add_request, 2 * i, "the", config()) for i in range(8)]
            cancelled = [pool.submit(pipeline.add_request, 2 * i + 1, "the", config()) for i in range(8)]
            ended = [pool.submit(one.result().cancel) for one in cancelled]
            generated = pool.submit(pipeline.generate, ["the", "keys"], config())
            steps = [pool.submit(pipeline.step) for _ in range(80)]
            for one in [*ended, *steps]:
                one.result()
            results = generated.result()
            handles = [one.result() for one in added]
    finally:
        sys.setswitchinterval(interval)
    run(pipeline)
    assert [result.texts for result in results] == [result.texts for result in alone]
    assert all(len(handle.read_all()[0].generated_ids) == 10 for handle in handles)


def test_metrics(pipeline):
    for number in range(3):
        pipeline.add_request(number, "the cache " * 10, config(max_new_tokens=5))
    pipeline.step()
    metrics = pipeline.get_metrics()
    assert metrics.requests == 3
    assert metrics.scheduled_requests >= 1
    assert 0 < metrics.cache_usage <= metrics.max_cache_usage <= 100
    assert (
        metrics.cache_size_in_bytes == 64 * 16 * 2 * 2 * 2 * 32 * 4
    )  # keys and values, layers, heads, floats
    run(pipeline)
    assert 0 < pipeline.get_metrics().avg_cache_usage < pipeline.get_metrics().max_cache_usage


def test_a_streamer_gets_the_text_and_may_stop_it(pipeline):
    pieces: list[str] = []
    (whole,) = pipeline.generate("the", config(), pieces.append)
    assert "".join(pieces) == whole.texts[0]
    seen: list[str] = []
    (part,) = pipeline.generate(
        "the", config(max_new_tokens=400), lambda text: seen.append(text) or len(seen) == 3
    )
    assert part.status is GenerationStatus.STOP
    assert part.texts[0].startswith("".join(seen))
    with pytest.raises(InvalidRequestError, match="one prompt and one completion"):
        pipeline.generate(["a", "b"], config(), print)


def test_a_streamer_that_stops_is_not_called_again(pipeline):
    (whole,) = pipeline.generate("the", config())
    withholding = tuple(character + "\u2603" for character in set(whole.texts[0]))  # each last character
    calls: list[str] = []
    (part,) = pipeline.generate(
        "the", config(stop_strings=withholding), lambda text: calls.append(text) or True
    )
    assert len(calls) == 1
    assert part.texts[0] == whole.texts[0][: len(part.texts[0])]
    assert len(part.texts[0]) > len(calls[0]), "some text was withheld when it stopped"


def test_a_failing_streamer_leaves_nothing(pipeline):
    with pytest.raises(ZeroDivisionError):
        pipeline.generate("the", config(), lambda text: 1 / 0)


def test_chat_remembers_its_turns(pipeline):
    tokenizer = pipeline.get_tokenizer()
    pipeline.start_chat("be brief")
    try:
        (first,) = pipeline.generate("hi", config(echo=True, max_new_tokens=3))
        asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        assert first.texts[0].startswith(tokenizer.apply_chat_template(asked))
        with pytest.raises(InvalidRequestError):
            pipeline.generate("hi " * 600, config())
        with pytest.raises(InvalidRequestError, match="one text"):
            pipeline.generate(["a", "b"], config())
        (second,) = pipeline.generate("ho", config(echo=True, max_new_tokens=3))
        assert second.texts[0].count("<|im_start|>user") == 2, "the refused turn is not remembered"
    finally:
        pipeline.finish_chat()


def test_echo_puts_the_prompt_in_front(pipeline):
    (plain,) = pipeline.generate("the", config())
    (echoed,) = pipeline.generate("the", config(echo=True))
    assert echoed.texts[0] == "the" + plain.texts[0]
    handle = pipeline.add_request(0, "the", config(echo=True))
    run(pipeline)
    assert handle.read_all()[0].generated_ids[:1] == pipeline.get_tokenizer().encode("the")[:1]


def test_lengths(pipeline):
    def num_generated(**fields) -> int:
        handle = pipeline.add_request(0, [5] * 20, GenerationConfig(ignore_eos=True, **fields))
        run(pipeline)
        return len(handle.read_all()[0].generated_ids)

    assert num_generated(max_length=25) == 5
    assert num_generated(max_length=25, max_new_tokens=7) == 7
    with pytest.raises(InvalidRequestError, match="max_length is 20, which leaves none"):
        num_generated(max_length=20)


def test_eos_token_id_replaces_the_models(pipeline):
    (free,) = pipeline.generate("the", config(logprobs=1))
    handle = pipeline.add_request(0, "the", config())
    run(pipeline)
    third = handle.read_all()[0].generated_ids[2]
    ended = pipeline.add_request(1, "the", GenerationConfig(max_new_tokens=10, eos_token_id=third))
    run(pipeline)
    assert ended.read_all()[0].generated_ids[-1] == third
    assert free.scores[0] < 0


def test_refusals_leave_nothing(pipeline):
    pipeline.add_request(7, "the", config())
    with pytest.raises(DuplicateRequestError):
        pipeline.add_request(7, "the", config())
    with pytest.raises(InvalidRequestError):
        pipeline.add_request(8, "", config())
    with pytest.raises(InvalidRequestError):
        pipeline.generate(["a", ""], config())
    with pytest.raises(ConfigError, match="do_sample"):
        pipeline.add_request(8, "a", config(num_return_sequences=2))
    run(pipeline)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("assistant_tokens", "did you mean 'num_assistant_tokens'"),
        ("generator", ""),
        ("max_new_token", "did you mean 'max_new_tokens'"),
    ],
)
def test_unknown_generation_fields_are_refused(name, nearest):
    with pytest.raises(ConfigError, match=f"{name}'.*{nearest}"):
        GenerationConfig(**{name: 2})
    with pytest.raises(ConfigError, match=f"{name}'.*{nearest}"):
        setattr(GenerationConfig(), name, 2)


def test_the_constructor_refuses(checkpoint):
    with pytest.raises(ConfigError, match=r"'GPU'.*CPU"):
        ContinuousBatchingPipeline(checkpoint, SCHEDULER, "GPU")
    with pytest.raises(ConfigError, match="did you mean 'num_threads'"):
        ContinuousBatchingPipeline(checkpoint, SCHEDULER, "CPU", {"num_thread": 1})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        ContinuousBatchingPipeline(checkpoint, SCHEDULER, "CPU", {"max_num_seqs": 1})
    with pytest.raises(ConfigError, match="set kv_tier to 'disk'"):
        ContinuousBatchingPipeline(checkpoint, SCHEDULER, "CPU", {"kv_tier_memory_size": 1.0})
    with pytest.raises(ConfigError, match="its own argument"):
        ContinuousBatchingPipeline(checkpoint, SCHEDULER, "CPU", {"model": "mini"})


def test_the_configuration_is_a_copy(pipeline):
    pipeline.get_config().max_new_tokens = 1
    assert pipeline.get_config() == GenerationConfig(eos_token_id=2, stop_token_ids={2})

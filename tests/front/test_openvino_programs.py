"""Programs for OpenVINO GenAI: results, conversations, parameters, streamers and drafts of its pipeline."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch

from quire import (
    LLM,
    ChatHistory,
    ContinuousBatchingPipeline,
    EncodedGenerationResult,
    GenerationConfig,
    GenerationFinishReason,
    GenerationResult,
    GenerationStatus,
    PerfMetrics,
    SamplingParams,
    SchedulerConfig,
    StopCriteria,
    StreamerBase,
    StreamingStatus,
    StructuredOutputConfig,
    TextStreamer,
)
from quire.config import SpeculationConfig
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from quire.front.openvino.tokenizer import Tokenizer

UNSET = 2**64 - 1
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def pipeline(checkpoint):
    return ContinuousBatchingPipeline(
        checkpoint, SchedulerConfig(num_kv_blocks=64, max_num_seqs=8), "CPU", {"num_threads": 1}
    )


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, num_threads=1, num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(pipeline):
    yield
    assert not pipeline.has_non_finished_requests()


def config(**fields) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 8, "ignore_eos": True, **fields})


def chat_text(llm, *conversations) -> list[str]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [output.outputs[0].text for output in llm.chat(list(conversations), params)]


# -- prompts -----------------------------------------------------------------------------------------------


def test_a_text_is_the_users_turn_unless_the_chat_template_is_off(pipeline, llm):
    turn = [{"role": "user", "content": "the"}]
    results = pipeline.generate(["the", "the"], [config(), config(apply_chat_template=False)])
    plain = llm.generate("the", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [result.texts[0] for result in results] == [*chat_text(llm, turn), plain[0].outputs[0].text]


def test_a_request_that_is_added_is_taken_as_it_is(pipeline):
    (plain,) = pipeline.generate("the", config(apply_chat_template=False))
    handle = pipeline.add_request(0, "the", config())
    while pipeline.has_non_finished_requests():
        pipeline.step()
    assert pipeline.get_tokenizer().decode(handle.read_all()[0].generated_ids) == plain.texts[0]


def test_conversations_are_those_of_the_chat_api(pipeline, llm):
    other = [{"role": "user", "content": "keys"}]
    expected = chat_text(llm, MESSAGES, other)
    histories = [ChatHistory(MESSAGES), ChatHistory(other)]
    for given in (histories, [MESSAGES, other], [MESSAGES, histories[1]]):
        assert [one.texts[0] for one in pipeline.generate(given, [config(), config()])] == expected
    for given in (ChatHistory(MESSAGES), MESSAGES, [MESSAGES], (MESSAGES,)):
        assert [one.texts[0] for one in pipeline.generate(given, config())] == expected[:1]
    assert pipeline.generate(histories=histories, generation_config=config())[1].texts == expected[1:]


def test_what_is_no_conversation_is_refused(pipeline):
    for given, message in (
        (ChatHistory(), "conversation"),
        ([[]], "prompt"),
        ([{"content": "the"}], "a prompt has 'content'"),
        ([[3.5]], "token ids"),
        ([None], "prompt"),
        (7, "prompts must be"),
        (b"the", "prompts must be"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            pipeline.generate(given, config())
    with pytest.raises(InvalidRequestError, match="apply_chat_template is off"):
        pipeline.generate(ChatHistory(MESSAGES), config(apply_chat_template=False))


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: [np.array([ids])],
        lambda ids: [np.array(ids, dtype=np.int32)],
        lambda ids: [torch.tensor([ids])],
        torch.tensor,
        lambda ids: [ids],
        lambda ids: ids,
        lambda ids: [type("Tensor", (), {"data": np.array([ids])})()],
    ],
)
def test_token_ids_come_in_lists_and_tensors_and_give_token_ids(pipeline, form):
    ids = pipeline.get_tokenizer().encode("the cache")
    (text,) = pipeline.generate("the cache", config(apply_chat_template=False, logprobs=1))
    (encoded,) = pipeline.generate(input_ids=form(ids), generation_config=[config(logprobs=1)])
    assert type(encoded) is EncodedGenerationResult
    assert type(text) is GenerationResult
    assert pipeline.get_tokenizer().decode(encoded.m_generation_ids[0]) == text.m_generation_ids[0]
    assert encoded.m_scores == text.m_scores
    assert encoded.m_scores[0] < 0
    (echoed,) = pipeline.generate(form(ids), config(echo=True))
    assert echoed.m_generation_ids == [[*ids, *encoded.m_generation_ids[0]]]


def test_tensors_of_another_shape_are_refused(pipeline):
    for tensor in (np.ones((2, 3), dtype=int), np.ones((1, 1, 3), dtype=int), np.array(3)):
        with pytest.raises(InvalidRequestError, match=r"it must be \[n\] or \[1, n\]"):
            pipeline.generate([tensor], config())
    with pytest.raises(InvalidRequestError, match="not float"):
        pipeline.generate([np.ones(3)], config())


def test_arguments_have_several_names_and_one_is_needed(pipeline):
    expected = pipeline.generate(["the"], [config()])[0].texts
    assert pipeline.generate(prompt="the", generation_config=config())[0].texts == expected
    assert pipeline.generate(prompts=["the"], generation_config=[config()])[0].texts == expected
    handle = pipeline.add_request(0, input_ids=np.array([[5, 6]]), generation_config=config())
    handle.cancel()
    for named in ({}, {"prompts": "a", "prompt": "b"}, {"prompts": "a", "images": []}, {"promt": "a"}):
        with pytest.raises(InvalidRequestError):
            pipeline.generate(**named)
    with pytest.raises(InvalidRequestError, match="images and videos are not supported"):
        pipeline.add_request(0, "the", generation_config=config(), videos=[])
    with pytest.raises(InvalidRequestError, match="generation_config must be GenerationConfig"):
        pipeline.add_request(0, "the", [3])


# -- results -----------------------------------------------------------------------------------------------


def test_a_result_has_openvino_genais_names(pipeline):
    (result,) = pipeline.generate(["the"], [config(logprobs=1)])
    assert result.m_generation_ids == result.get_generation_ids() == result.texts
    assert result.m_scores == result.scores
    assert result.m_request_id == result.request_id == 0
    assert result.m_status is result.status is GenerationStatus.FINISHED
    assert str(result.m_status) == f"{result.m_status}" == "GenerationStatus.FINISHED"
    assert result.finish_reasons == [GenerationFinishReason.LENGTH]
    assert result.extended_perf_metrics is None
    result.m_generation_ids, result.m_scores = ["a"], [1.0]
    result.m_status = GenerationStatus.STOP
    assert (result.texts, result.scores, result.status) == (["a"], [1.0], GenerationStatus.STOP)


def test_metrics_of_a_request(pipeline):
    prompts = ["the cache " * 20, "the"]
    results = pipeline.generate(prompts, config(apply_chat_template=False, max_new_tokens=6))
    for prompt, result in zip(prompts, results, strict=True):
        metrics = result.perf_metrics
        assert metrics.get_num_input_tokens() == len(pipeline.get_tokenizer().encode(prompt))
        assert metrics.get_num_generated_tokens() == 6
        assert 0 < metrics.get_ttft().mean < metrics.get_generate_duration().mean
        assert metrics.get_tpot().mean > 0
        assert metrics.get_throughput().mean == pytest.approx(1e3 / metrics.get_tpot().mean)
        assert metrics.get_load_time() > 0
        assert metrics.get_tokenization_duration().mean > 0
        assert list(metrics.get_inference_duration()) == [-1.0, -1.0], "not measured"
        assert metrics.get_grammar_compile_time().as_tuple() == (-1.0, 0.0, -1.0, -1.0)
    both = results[0].perf_metrics + results[1].perf_metrics
    times = [result.perf_metrics.get_ttft().mean for result in results]
    assert list(both.get_ttft()) == pytest.approx([np.mean(times), np.std(times)])
    assert both.get_num_generated_tokens() == 12
    assert list(PerfMetrics().get_throughput()) == [-1.0, -1.0]
    handle = pipeline.add_request(0, "the", config())
    assert list(handle.get_perf_metrics().get_ttft()) == [-1.0, -1.0]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    assert handle.get_perf_metrics().get_num_generated_tokens() == 8
    with pytest.raises(InvalidRequestError, match="get_vlm_perf_metrics"):
        handle.get_vlm_perf_metrics()


def test_a_request_is_stopped_with_a_reason(pipeline):
    for end, reason in (
        (lambda handle: handle.stop(), GenerationFinishReason.STOP),
        (lambda handle: handle.drop(), GenerationFinishReason.STOP),
        (lambda handle: handle.stop(GenerationFinishReason.TOOL_CALL), GenerationFinishReason.TOOL_CALL),
    ):
        handle = pipeline.add_request(0, "the", config(max_new_tokens=300))
        pipeline.step()
        pipeline.step()
        assert handle.read_all()[0].finish_reason is GenerationFinishReason.NONE
        end(handle)
        assert handle.get_status() is GenerationStatus.STOP
        assert handle.read_all()[0].finish_reason is reason


# -- generation parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("unset", [UNSET, None])
def test_unset_limits_are_no_limits(pipeline, unset):
    fields = {"max_length": unset, "max_new_tokens": unset, "top_k": unset, "no_repeat_ngram_size": unset}
    made = GenerationConfig(**fields, do_sample=True, ignore_eos=True)
    assert [getattr(made, name) for name in fields] == [UNSET] * 4
    (result,) = pipeline.generate([[5] * 500], made)
    assert len(result.m_generation_ids[0]) == 12, "up to the model's maximum length"


def test_ways_of_decoding():
    greedy, beams = GenerationConfig(), GenerationConfig(num_beams=4)
    sampling = GenerationConfig(do_sample=True)
    ways = {"greedy_decoding": greedy, "beam_search": beams, "multinomial": sampling}
    for way, made in ways.items():
        assert [name for name in ways if getattr(made, f"is_{name}")()] == [way]
    made = GenerationConfig(num_assistant_tokens=3)
    assert (made.is_assisting_generation(), made.is_prompt_lookup()) == (True, False)
    made.max_ngram_size = 2
    assert made.is_prompt_lookup()
    assert not made.is_tree_search()


def test_what_sampling_would_need_has_no_effect_without_it(pipeline):
    (greedy,) = pipeline.generate("the", config())
    assert pipeline.generate("the", config(temperature=0.3, top_k=4, min_p=0.5))[0].texts == greedy.texts
    beams = {"num_beams": 2, "num_return_sequences": 2, "stop_criteria": StopCriteria.NEVER}
    (expected,) = pipeline.generate("the", config(**beams))
    (found,) = pipeline.generate("the", config(**beams, top_p=0.3, top_k=4, min_p=0.5))
    assert found.texts == expected.texts
    assert found.m_scores == expected.m_scores
    assert len(found.texts) == 2


def test_scores_are_of_all_tokens_so_far_and_of_beams_by_length(pipeline, llm):
    handle = pipeline.add_request(0, [5, 6, 7], config(logprobs=1))
    read = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        read += handle.read().values()
    sums = np.cumsum([output.generated_log_probs[0] for output in read])
    assert [output.score for output in read] == pytest.approx(sums.tolist())
    params = SamplingParams(
        beam_width=2, n=2, max_tokens=6, temperature=0.0, length_penalty=2.0, ignore_eos=True
    )
    expected = [one.cumulative_logprob / 6**2 for one in llm.generate([[5, 6, 7]], params)[0].outputs]
    beams = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 2.0, "max_new_tokens": 6}
    (result,) = pipeline.generate([[5, 6, 7]], config(**beams))
    assert result.m_scores == pytest.approx(expected)
    handle = pipeline.add_request(0, [5, 6, 7], config(**beams))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    assert [output.score for output in handle.read_all()] == result.m_scores


def test_sets_of_stop_strings_and_tokens(pipeline):
    made = GenerationConfig(stop_strings="a", stop_token_ids=[3, 3])
    assert made.stop_strings == {"a"}
    assert made.stop_token_ids == {3}
    made.stop_strings = {"b", "c"}
    assert made.sampling_params(UNSET, ()).stop == ("b", "c")
    (free,) = pipeline.generate("the", config(apply_chat_template=False))
    word = free.texts[0][2:4]
    stops = {"apply_chat_template": False, "stop_strings": {word, "zzz"}}
    (stopped,) = pipeline.generate("the", config(**stops))
    assert stopped.texts[0] == free.texts[0].split(word)[0]
    assert stopped.finish_reasons == [GenerationFinishReason.STOP]
    (shown,) = pipeline.generate("the", config(**stops, include_stop_str_in_output=True))
    assert shown.texts[0] == stopped.texts[0] + word
    for name, bad in (("stop_strings", {1}), ("stop_strings", [["a"]]), ("stop_token_ids", {"a"})):
        with pytest.raises(InvalidRequestError, match=name):
            GenerationConfig(**{name: bad}).validate()


def test_updates_of_several_fields_and_of_the_end_of_sequence():
    made = GenerationConfig()
    made.update_generation_config(max_new_tokens=5, do_sample=True)
    assert (made.max_new_tokens, made.do_sample) == (5, True)
    with pytest.raises(ConfigError, match="did you mean 'max_new_tokens'"):
        made.update_generation_config(max_new_token=5)
    made.set_eos_token_id(7)
    made.set_eos_token_id(8)
    assert (made.eos_token_id, made.stop_token_ids) == (8, {7, 8})
    assert GenerationConfig(eos_token_id=3).stop_token_ids == {3}


def test_the_models_own_end_of_sequence_may_be_named_beside_a_grammar(pipeline):
    made = pipeline.get_config()
    own = pipeline.get_tokenizer().eos_token_ids
    assert made.eos_token_id in own
    made.structured_output_config = StructuredOutputConfig(regex="[ab]{3}")
    made.max_new_tokens = 20
    (result,) = pipeline.generate("the", made)
    assert len(result.texts[0]) == 3
    assert set(result.texts[0]) <= {"a", "b"}
    assert result.finish_reasons == [GenerationFinishReason.STOP]
    made.set_eos_token_id(5)
    made.stop_token_ids = {5}
    with pytest.raises(ConfigError, match=r"eos_token_id is 5, .* needs the model's own"):
        pipeline.generate("the", made)


def test_ignore_eos_ignores_the_end_of_sequence_that_is_named(pipeline):
    (free,) = pipeline.generate([[5, 6, 7]], config())
    third = free.m_generation_ids[0][2]
    (ended,) = pipeline.generate([[5, 6, 7]], config(eos_token_id=third, ignore_eos=False))
    assert ended.m_generation_ids[0] == free.m_generation_ids[0][: free.m_generation_ids[0].index(third) + 1]
    for ending in ({"eos_token_id": third}, {"stop_token_ids": {third}}):
        (ignored,) = pipeline.generate([[5, 6, 7]], config(**ending))
        assert ignored.m_generation_ids == free.m_generation_ids


def test_parameters_from_a_file(tmp_path):
    file = tmp_path / "generation_config.json"
    entries = {"eos_token_id": [4, 5], "temperature": 0.6, "do_sample": True, "early_stopping": True, "x": {}}
    file.write_text(json.dumps({**entries, "max_length": None}))
    made = GenerationConfig(file, top_k=3)
    assert (made.temperature, made.top_k, made.max_length) == (0.6, 3, UNSET)
    assert (made.eos_token_id, made.stop_token_ids) == (4, {4, 5})
    assert made.stop_criteria is StopCriteria.EARLY or made.stop_criteria == "early"
    assert GenerationConfig(str(file)) == GenerationConfig(file)
    for text, error in (
        ("[]", ModelError),
        ("{", ModelError),
        ('{"eos_token_id": [[1]]}', ModelError),
        ('{"eos_token_id": 1, "stop_token_ids": 3}', ModelError),
        ('{"tree_depth": 3}', ConfigError),
        ('{"early_stopping": "soon"}', InvalidRequestError),
        ('{"temperature": "hot", "do_sample": true}', InvalidRequestError),
    ):
        file.write_text(text)
        with pytest.raises(error):
            GenerationConfig(file).validate()
    with pytest.raises(ModelError, match="no file"):
        GenerationConfig(tmp_path / "other.json")


def test_values_out_of_range_are_named_as_here():
    for name, value in (
        ("max_new_tokens", 0), ("max_new_tokens", -1), ("max_length", 0), ("top_k", -1), ("eos_token_id", -2),
        ("num_beams", 0), ("num_beams", 99), ("min_new_tokens", -1), ("rng_seed", 2**63), ("logprobs", -1),
        ("temperature", -0.5), ("stop_criteria", "soon"), ("num_assistant_tokens", -1), ("echo", 1),
        ("structured_output_config", {}), ("apply_chat_template", 1), ("eos_token_id", 2**40),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=f"^{name} is"):
            GenerationConfig(**{name: value}).validate()


# -- streamers ---------------------------------------------------------------------------------------------


class Tokens(StreamerBase):
    """Keeps what it gets."""

    def __init__(self, answers=()) -> None:
        super().__init__()
        self.token_ids: list[int] = []
        self.num_ends = 0
        self.answers = list(answers)

    def write(self, token):
        assert type(token) is list
        self.token_ids += token
        return self.answers.pop(0) if self.answers else StreamingStatus.RUNNING

    def end(self) -> None:
        self.num_ends += 1


def test_a_streamer_of_tokens_gets_each_and_the_end(pipeline):
    streamer = Tokens()
    (result,) = pipeline.generate([[5, 6]], config(), streamer)
    assert streamer.token_ids == result.m_generation_ids[0]
    assert streamer.num_ends == 1
    shown: list[str] = []
    (result,) = pipeline.generate("the", config(), TextStreamer(pipeline.get_tokenizer(), shown.append))
    assert "".join(shown) == result.texts[0]
    assert len(shown) > 1

    class Older(StreamerBase):
        def put(self, token):
            return True

    assert pipeline.generate("the", config(), Older())[0].m_status is GenerationStatus.STOP


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (StreamingStatus.STOP, GenerationStatus.STOP, GenerationFinishReason.STOP),
        (True, GenerationStatus.STOP, GenerationFinishReason.STOP),
        (1, GenerationStatus.STOP, GenerationFinishReason.STOP),
        (StreamingStatus.CANCEL, GenerationStatus.CANCEL, GenerationFinishReason.STOP),
        (2, GenerationStatus.CANCEL, GenerationFinishReason.STOP),
        (StreamingStatus.TOOL_CALL_STOP, GenerationStatus.STOP, GenerationFinishReason.TOOL_CALL),
        (StreamingStatus.RUNNING, GenerationStatus.FINISHED, GenerationFinishReason.LENGTH),
        (False, GenerationStatus.FINISHED, GenerationFinishReason.LENGTH),
        (0, GenerationStatus.FINISHED, GenerationFinishReason.LENGTH),
        (None, GenerationStatus.FINISHED, GenerationFinishReason.LENGTH),
    ],
)
def test_a_streamer_may_end_the_request(pipeline, answer, status, reason):
    streamer = Tokens([None, answer])
    for one in (streamer, lambda text: answer):
        (result,) = pipeline.generate([[5, 6]], config(), one)
        assert (result.m_status, result.finish_reasons) == (status, [reason])
    assert (len(streamer.token_ids) == 2) == (status is not GenerationStatus.FINISHED)
    assert streamer.num_ends == 1


def test_a_turn_that_is_cancelled_is_not_remembered(pipeline):
    pipeline.start_chat("be brief")
    try:
        pipeline.generate("hi", config(), lambda text: StreamingStatus.CANCEL)
        (second,) = pipeline.generate("ho", config(echo=True, max_new_tokens=3))
        pipeline.generate("hu", config(), lambda text: StreamingStatus.STOP)
        (fourth,) = pipeline.generate("ha", config(echo=True, max_new_tokens=3))
    finally:
        pipeline.finish_chat()
    assert second.texts[0].count("<|im_start|>user") == 1
    assert fourth.texts[0].count("<|im_start|>user") == 3


def test_a_streamer_ends_after_an_error_and_what_is_none_is_refused(pipeline):
    streamer = Tokens()
    streamer.write = lambda token: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pipeline.generate("the", config(), streamer)
    assert streamer.num_ends == 1
    with pytest.raises(InvalidRequestError, match="streamer must be a function or a StreamerBase, not int"):
        pipeline.generate("the", config(), 3)
    with pytest.raises(InvalidRequestError, match="without beam search"):
        pipeline.generate("the", config(num_beams=2), print)


# -- conversations -----------------------------------------------------------------------------------------


def test_a_history_keeps_copies():
    message = {"role": "user", "content": "a"}
    history = ChatHistory([message])
    message["content"] = "b"
    history.get_messages()[0]["content"] = "c"
    assert history.get_messages() == [{"role": "user", "content": "a"}]
    history.append({"role": "assistant", "content": "d"})
    assert (len(history), bool(history)) == (2, True)
    assert history.pop() == {"role": "assistant", "content": "d"}
    history.set_tools([{"type": "function"}])
    history.set_extra_context({"enable_thinking": False})
    history.clear()
    assert not history
    assert (history.get_tools(), history.get_extra_context()) == (
        [{"type": "function"}],
        {"enable_thinking": False},
    )
    for bad in (lambda: history.append(3), lambda: history.set_tools([3]), lambda: history.set_messages("a")):
        with pytest.raises(InvalidRequestError):
            bad()
    with pytest.raises(IndexError):
        history.pop()


def test_the_tokenizer_has_openvino_genais_names(pipeline, llm):
    tokenizer, own = pipeline.get_tokenizer(), llm.get_tokenizer()
    encoded = tokenizer.encode("the cache", add_special_tokens=False)
    assert encoded == own.encode("the cache", add_special_tokens=False)
    assert encoded.input_ids.tolist() == [list(encoded)]
    assert encoded.attention_mask.tolist() == [[1] * len(encoded)]
    for given in (encoded, np.array(encoded), tuple(encoded)):
        assert tokenizer.decode(given) == "the cache"
    for given in (encoded.input_ids, [list(encoded)], torch.tensor([encoded])):
        assert tokenizer.decode(given) == ["the cache"]
    ends = [own.eos_token_ids[0], *encoded]
    assert tokenizer.decode(ends) == own.decode(ends) != tokenizer.decode(ends, False)
    text = own.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(ChatHistory(MESSAGES), True) == text
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == own.apply_chat_template(
        MESSAGES, add_generation_prompt=False
    )
    assert tokenizer.chat_template == tokenizer.get_original_chat_template() == own.chat_template_source
    assert tokenizer.get_eos_token_id() in own.eos_token_ids
    assert own.decode([tokenizer.get_eos_token_id()], skip_special_tokens=False) == tokenizer.get_eos_token()
    for name in ("bos", "pad"):
        token, token_id = (getattr(tokenizer, f"get_{name}_token{end}")() for end in ("", "_id"))
        assert own.token_name(token_id) == token if token else token_id == -1
    assert tokenizer.vocab_size == own.vocab_size
    with pytest.raises(InvalidRequestError, match="one text, not list"):
        tokenizer.encode(["a"])
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        tokenizer.apply_chat_template(MESSAGES, True, "{{ 1 }}")
    handle = pipeline.add_request(0, tokenizer.encode("the").input_ids, config())
    handle.cancel()


# -- the pipeline ------------------------------------------------------------------------------------------


def test_the_error_for_a_small_cache_names_the_cache(checkpoint):
    small = ContinuousBatchingPipeline(checkpoint, SchedulerConfig(num_kv_blocks=4), num_threads=1)
    for prompt, fields in (([5] * 64, {}), ([5], {"max_new_tokens": 70}), ([5] * 60, {"min_new_tokens": 9})):
        with pytest.raises(InvalidRequestError, match=r"4 x 16 tokens .*SchedulerConfig.num_kv_blocks"):
            small.generate([prompt], GenerationConfig(**fields))
    large = ContinuousBatchingPipeline(checkpoint, SchedulerConfig(num_kv_blocks=4), max_model_len=64)
    with pytest.raises(ContextLengthError, match="max_model_len is 64"):
        large.generate([[5] * 64], GenerationConfig())


def test_prompt_lookup_changes_no_token(checkpoint, pipeline, caplog):
    drafting = ContinuousBatchingPipeline(
        checkpoint, SchedulerConfig(num_kv_blocks=64), "CPU", {"prompt_lookup": True, "num_threads": 1}
    )
    lookup = {"num_assistant_tokens": 4, "max_ngram_size": 4}
    prompt = "the cache of the cache of the cache"
    with caplog.at_level(logging.WARNING):
        (drafted,) = drafting.generate(prompt, config(**lookup, max_new_tokens=30))
    assert not caplog.records
    (plain,) = pipeline.generate(prompt, config(max_new_tokens=30))
    assert drafted.texts == plain.texts
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drafting.generate(prompt, config(**{**lookup, "num_assistant_tokens": 5}))
    [record] = caplog.records
    assert "num_assistant_tokens is 5" in record.getMessage()
    with pytest.raises(ConfigError, match=r"num_assistant_tokens is 4, .*prompt_lookup"):
        pipeline.generate(prompt, config(**lookup))
    with pytest.raises(ConfigError, match="max_ngram_size is 4, but num_assistant_tokens"):
        config(max_ngram_size=4).validate()


def test_the_constructor_takes_properties_by_keyword_and_refuses_others(checkpoint):
    for options, message in (
        ({"tokenizer_properties": {"a": 1}}, "tokenizer_properties"),
        ({"draft_model": "a"}, "draft_model"),
        ({"NUM_STREAMS": 1}, "NUM_STREAMS"),
        ({"properties": {"prompt_lookup": True, "speculation": SpeculationConfig()}}, "prompt_lookup"),
        ({"properties": 3}, "properties"),
    ):
        with pytest.raises(ConfigError, match=message):
            ContinuousBatchingPipeline(checkpoint, SchedulerConfig(), "CPU", **options)
    with pytest.raises(ConfigError, match=r"must be SchedulerConfig, not Tokenizer; another"):
        ContinuousBatchingPipeline(checkpoint, Tokenizer(None), SchedulerConfig(), "CPU")

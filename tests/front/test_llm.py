"""`LLM`: order, `n`, stop strings and log-probabilities on a real engine, and what is left after trouble."""

from __future__ import annotations

import concurrent.futures
import gc
import signal
import sys
import weakref

import pytest

from engine_checks import TINY, check_after_every_step, core_of, requests_of
from quire import LLM, SamplingParams, SchedulerConfig
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelNotFoundError
from quire.status import FinishReason

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **TINY, max_num_batched_tokens=32, max_num_seqs=8) as llm:
        check_after_every_step(core_of(llm))
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert len(requests_of(llm).outputs) == 0


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{'the cache ' * (index % 7)}{index}" for index in range(30)]
    params = [
        SamplingParams(max_tokens=1 + index % 9, temperature=0.0, ignore_eos=True) for index in range(30)
    ]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert outputs[5].outputs == llm.generate(prompts[5], params[5])[0].outputs, "the same as alone"


def test_text_is_the_decoded_tokens(llm):
    for output in llm.generate(["the cache", "keys"], GREEDY):
        text = llm.get_tokenizer().decode(output.outputs[0].token_ids)
        assert output.outputs[0].text == text


def test_token_ids_are_a_prompt(llm):
    ids = llm.get_tokenizer().encode("the cache")
    by_ids, by_text = llm.generate([ids, "the cache"], GREEDY)
    assert by_ids.outputs == by_text.outputs
    assert llm.generate(ids, GREEDY)[0].outputs == by_text.outputs
    assert by_ids.prompt is None


def test_prompts_as_vllms_users_write_them(llm):
    ids = llm.get_tokenizer().encode("the cache")
    [expected] = llm.generate("the cache", GREEDY)
    forms = ["the cache", ids, {"prompt": "the cache"}, {"prompt_token_ids": ids, "prompt": "shown"}]
    for outputs in (llm.generate(forms, GREEDY), [llm.generate(form, GREEDY)[0] for form in forms]):
        assert [output.outputs for output in outputs] == [expected.outputs] * len(forms)


def test_n_completions_have_seeds_of_their_own(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate("the", params)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert llm.generate("the", params)[0].outputs == output.outputs
    (alone,) = llm.generate("the", SamplingParams(seed=7, max_tokens=10, ignore_eos=True))
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_more_sequences_than_run_at_once(llm):
    (output,) = llm.generate("the", SamplingParams(n=40, max_tokens=3, ignore_eos=True))
    assert all(len(one.token_ids) == 3 for one in output.outputs)


def only_letters(llm) -> dict[int, float]:
    """Return a bias against all tokens that are not lower-case words, so that texts are easy to cut."""
    texts = {
        token_id: llm.get_tokenizer().token_text(token_id).strip() for token_id in range(llm.info.vocab_size)
    }
    return {token_id: -100.0 for token_id, text in texts.items() if not (text.isascii() and text.islower())}


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_token_boundaries_ends_the_engines_work(llm, include):
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logit_bias": only_letters(llm)}
    (free,) = llm.generate("the cache", SamplingParams(**settings))
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    cut = len(llm.get_tokenizer().decode(ids[:5]))
    stop = text[cut - 1 : cut + 1]
    assert text.index(stop) == cut - 1, "one character of token 5 and one of token 6, and not before"
    params = SamplingParams(**settings, stop=stop, include_stop_str_in_output=include)
    completion = llm.generate("the cache", params)[0].outputs[0]
    assert completion.text == text[: cut + 1 if include else cut - 1]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert completion.token_ids == ids[:6]


def test_stop_token_ids(llm):
    (free,) = llm.generate("the cache", GREEDY)
    third = free.outputs[0].token_ids[2]
    end = free.outputs[0].token_ids.index(third) + 1
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(third,))
    completion = llm.generate("the cache", params)[0].outputs[0]
    assert completion.token_ids == free.outputs[0].token_ids[:end]
    assert completion.stop_reason == third
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids[:-1])


def test_logprobs_and_prompt_logprobs(llm):
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("the cache holds " * 12, params)  # a prompt of several chunks
    completion = output.outputs[0]
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1
    assert output.prompt_logprobs[0] is None
    for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert position[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)


def test_chat_uses_the_template(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt.endswith("<|im_start|>assistant\n")
    two = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], GREEDY)
    assert two[0].outputs == output.outputs
    assert two[1].prompt_token_ids != output.prompt_token_ids


def test_a_shared_prefix_is_found_again(llm):
    llm.reset_prefix_cache()
    prompt = "the cache holds keys and values " * 4
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0
    assert first.outputs == second.outputs
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_an_invalid_prompt_stops_the_batch_before_it_starts(llm):
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["the", ""], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 prompts but 1"):
        llm.generate(["the", "a"], [GREEDY])
    assert llm.stats().num_steps == steps


def test_what_the_scheduler_refuses_reaches_the_caller(checkpoint):
    with (
        LLM(checkpoint, num_threads=1, num_kv_blocks=2, max_model_len=32, max_num_seqs=1) as small,
        pytest.raises(InvalidRequestError),
    ):
        small.generate(["a", "the cache holds keys and values " * 20], GREEDY)


def test_a_batch_longer_than_the_queue_goes_through(checkpoint):
    with LLM(checkpoint, **TINY, max_num_seqs=2, max_num_queued_reqs=1) as small:
        outputs = small.generate([f"prompt {index}" for index in range(9)], GREEDY)
        assert [output.prompt for output in outputs] == [f"prompt {index}" for index in range(9)]


def test_ctrl_c_in_a_step_aborts_all_and_leaves_it_usable(llm, monkeypatch):
    (before,) = llm.generate("the cache", GREEDY)
    runner = core_of(llm).runner
    execute, finished = runner.execute, []

    def interrupted(scheduled, grammar=None):
        if not finished:
            signal.raise_signal(signal.SIGINT)
        output = execute(scheduled, grammar)
        finished.append(True)
        return output

    monkeypatch.setattr(runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the cache"] * 5, GREEDY)
    assert finished == [True], "the step was not torn"
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert llm.generate("the cache", GREEDY)[0].outputs == before.outputs


def test_ctrl_c_while_a_request_is_queued_leaves_nothing(llm, monkeypatch):
    scheduler = core_of(llm).scheduler
    add_request = scheduler.add_request

    def interrupted(request):
        signal.raise_signal(signal.SIGINT)
        add_request(request)

    monkeypatch.setattr(scheduler, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("the cache", GREEDY)
    assert not requests_of(llm).outputs
    assert not scheduler.has_unfinished_requests()


def test_ctrl_c_while_a_request_is_registered_leaves_nothing(llm, monkeypatch):
    outputs = requests_of(llm).outputs
    add = outputs.add

    def interrupted(*request):
        state = add(*request)
        signal.raise_signal(signal.SIGINT)
        return state

    monkeypatch.setattr(outputs, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("the cache", GREEDY)
    assert not outputs


def test_ctrl_c_while_a_call_is_answered_leaves_nothing(llm, monkeypatch):
    core = core_of(llm)
    stats = core.stats

    def interrupted():
        monkeypatch.setattr(core, "stats", stats)
        signal.raise_signal(signal.SIGINT)
        return stats()

    monkeypatch.setattr(core, "stats", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.stats()
    assert llm.generate("the cache", GREEDY)


def test_a_request_that_cannot_be_sent_leaves_nothing(llm, monkeypatch):
    send = requests_of(llm).client.send

    def lossy(message):
        if isinstance(message, EngineCoreRequest):
            raise OverflowError("too large for the wire")
        send(message)

    monkeypatch.setattr(requests_of(llm).client, "send", lossy)
    with pytest.raises(OverflowError):
        llm.generate("the cache", GREEDY)
    assert not requests_of(llm).outputs


@pytest.mark.parametrize("prompts", [None, iter(["a"]), 5, b"the cache", bytearray(b"a")])
def test_what_is_neither_a_prompt_nor_prompts_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match=f"prompts.*{type(prompts).__name__}"):
        llm.generate(prompts)
    with pytest.raises(InvalidRequestError, match=f"messages.*{type(prompts).__name__}"):
        llm.chat(prompts)


@pytest.mark.parametrize("prompt", [b"the cache", {"prompt": b"the cache"}, None])
def test_one_of_several_prompts_that_is_neither_text_nor_token_ids_is_refused(llm, prompt):
    with pytest.raises(InvalidRequestError, match="a string or a list of token ids"):
        llm.generate(["a", prompt])


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": None}, {"text": "a"}, {"prompt": "a", "multi_modal_data": {}}]
)
def test_mappings_that_are_no_prompts_are_refused(llm, prompt):
    for prompts in (prompt, ["a", prompt]):
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            llm.generate(prompts)


def test_threads_take_turns(llm):
    params = [SamplingParams(max_tokens=9, seed=seed, ignore_eos=True, logprobs=1) for seed in range(4)]
    prompts = [f"{'the cache ' * (seed % 3)}{seed}" for seed in range(4)]
    alone = [output.outputs for output in llm.generate(prompts, params)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads that did not take turns would meet in most steps
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = pool.map(lambda _: [one.outputs for one in llm.generate(prompts, params)], range(8))
            assert list(together) == [alone] * 8
    finally:
        sys.setswitchinterval(interval)


def test_progress_by_vllms_name(llm, capsys):
    llm.generate("a", GREEDY, use_tqdm=True)
    assert "1/1" in capsys.readouterr().err
    llm.generate("a", GREEDY, use_tqdm=False, progress=True)
    assert capsys.readouterr().err == ""


def test_progress_is_shown_on_standard_error(llm, capsys):
    llm.generate(["a", "b"], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_options_by_name(checkpoint):
    llm = LLM(
        checkpoint,
        num_threads=1,
        scheduler=SchedulerConfig(num_kv_blocks=40),
        max_num_seqs=3,
        dtype="bfloat16",
    )
    assert (llm.info.num_blocks, llm.config.scheduler.max_num_seqs, llm.info.dtype) == (40, 3, "bfloat16")
    llm.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 3}, "max_num_seq'.*did you mean 'max_num_seqs'"),
        ({"dtyp": "float32"}, "did you mean 'dtype'"),
        ({"scheduler": {"num_kv_blocks": 3}}, "SchedulerConfig, not dict"),
        ({"scheduler_cls": "quire.nothing.Here"}, "quire.nothing.Here"),
        ({"scheduler_cls": "quire.config.EngineConfig"}, "SchedulerInterface"),
    ],
)
def test_unusable_options(checkpoint, options, words):
    with pytest.raises(ConfigError, match=words):
        LLM(checkpoint, **{**TINY, **options})


def test_an_unknown_model_is_refused():
    with pytest.raises(ModelNotFoundError, match="not a valid hub name"):
        LLM("no/such/directory/here")


def test_shutdown_lets_go_of_the_model(checkpoint):
    llm = LLM(checkpoint, **TINY)
    core = weakref.ref(core_of(llm))
    llm.shutdown()
    gc.collect()
    assert core() is None
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("the")
    llm.shutdown()


def test_the_built_in_model_answers():
    with LLM(**TINY) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "What is a KV block?"}], SamplingParams(max_tokens=5)
        )
        assert 1 <= len(output.outputs[0].token_ids) <= 5
        chats, tools = [[{"role": "user", "content": "Hi"}]] * 2, [{"function": {"name": "ping"}}]
        for_all = llm.chat(chats, GREEDY, tools=tools)
        assert ["ping()" in one.prompt for one in for_all] == [True, True]
        for_each = llm.chat(chats, GREEDY, tools=[None, tools])
        assert ["ping()" in one.prompt for one in for_each] == [False, True]
        for wrong in ([tools], 5, [5, 5]):
            with pytest.raises(InvalidRequestError) as refused:
                llm.chat(chats, GREEDY, tools=wrong)
            assert refused.value.param == "tools"


def test_a_replaced_scheduler_is_used(checkpoint):
    with LLM(checkpoint, **TINY, scheduler_cls="engine_schedulers.CountingScheduler") as llm:
        llm.generate("the", GREEDY)
        assert core_of(llm).scheduler.num_scheduled >= 12

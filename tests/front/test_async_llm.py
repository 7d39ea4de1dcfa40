"""`AsyncLLM`: streams, cancellation, errors as exceptions, and the same tokens as `LLM`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import shutil
import time
import types

import pytest

from engine_checks import TINY, tiny_config
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.config import SupervisionConfig
from quire.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    QuireError,
    RequestTimeoutError,
    UnknownArchitectureError,
)
from quire.front import async_llm, live_requests
from quire.status import FinishReason
from quire.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("preloaded_engines")

LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


async def last_of(stream):
    last = None
    async for output in stream:
        assert last is None or not last.finished, "nothing comes after the last output"
        last = output
    assert last.finished
    return last


async def wait_until_empty(llm: AsyncLLM):
    """Return the statistics once the engine holds nothing; each look is a round trip, not a sleep."""
    async with asyncio.timeout(60):
        while True:
            stats = await llm.stats()
            if not stats.num_running and not stats.num_waiting and stats.num_free_blocks == stats.num_blocks:
                return stats


@contextlib.asynccontextmanager
async def engine(checkpoint, **scheduler):
    llm = AsyncLLM(tiny_config(checkpoint, **scheduler))
    try:
        yield llm
        await wait_until_empty(llm)
        assert llm.num_unfinished_requests == 0
    finally:
        await llm.shutdown()


async def test_concurrent_streams_equal_offline_outputs(checkpoint):
    prompts = [f"{'the cache holds ' * (index % 5)}{index}" for index in range(12)]
    params = [
        SamplingParams(
            max_tokens=5 + index, seed=index, temperature=index % 3 / 2, ignore_eos=True, n=1 + index % 2
        )
        for index in range(12)
    ]
    with LLM(checkpoint, **TINY) as offline:
        expected = offline.generate(prompts, params)
    async with engine(checkpoint, max_num_batched_tokens=24) as llm:
        outputs = await asyncio.gather(
            *(last_of(llm.generate(*pair)) for pair in zip(prompts, params, strict=True))
        )
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs == wanted.outputs
        assert output.prompt == wanted.prompt


async def test_one_engine_many_uses(checkpoint):
    """One start-up for all that leaves the engine well."""
    async with engine(checkpoint, max_num_seqs=4, max_num_queued_reqs=6) as llm:
        progress = []
        info = await llm.wait_until_ready(lambda *counts: progress.append(counts))
        assert progress[-1][0] == progress[-1][1] > 0
        assert (info.num_blocks, info.max_model_len, info.dtype) == (64, 512, "float32")
        await streams_grow(llm)
        await closing_aborts(llm)
        await cancelling_aborts(llm)
        await aborting_from_outside_ends_the_stream(llm)
        await errors_reach_the_caller(llm)
        await a_full_queue_refuses(llm)
        await later_parts_of_a_call_wait_for_room(llm)
        await the_timeout_of_later_parts_of_a_call_counts_from_its_beginning(llm)
        await slow_callers_miss_nothing_but_the_middle(llm)
        await prefixes_are_forgotten(llm)
        await a_bad_grammar_fails_its_request_alone(llm)
        await time_that_is_up_is_an_exception(llm)
        await requests_are_explained(llm)
        await health(llm)
    with pytest.raises(EngineDeadError, match="shut down"):
        await last_of(llm.generate("the"))
    with pytest.raises(EngineDeadError):
        llm.check_health()
    await llm.shutdown()


async def streams_grow(llm):
    sizes, texts = [], []
    async for output in llm.generate("the cache", greedy(8), request_id="mine"):
        assert output.request_id == "mine"
        sizes.append(len(output.outputs[0].token_ids))
        texts.append(output.outputs[0].text)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 8
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


async def closing_aborts(llm):
    stream = llm.generate("the", LONG, request_id="again")
    await anext(stream)
    assert llm.num_unfinished_requests == 1
    await stream.aclose()
    assert llm.num_unfinished_requests == 0
    # The id is free at once, and what the engine still says of the old request does not reach the new one.
    output = await last_of(llm.generate("the", greedy(3), request_id="again"))
    assert len(output.outputs[0].token_ids) == 3
    await wait_until_empty(llm)


async def cancelling_aborts(llm):
    started = asyncio.Event()

    async def consume():
        async for _ in llm.generate("the", SamplingParams(n=3, max_tokens=400, ignore_eos=True)):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.num_unfinished_requests == 0
    await wait_until_empty(llm)


async def aborting_from_outside_ends_the_stream(llm):
    stream = llm.generate("the", LONG, request_id="victim")
    await anext(stream)
    llm.abort("victim")
    llm.abort("unknown")
    output = await last_of(stream)
    assert output.outputs[0].finish_reason is FinishReason.ABORT


async def errors_reach_the_caller(llm):
    with pytest.raises(InvalidRequestError, match="empty"):
        await anext(llm.generate(""))
    with pytest.raises(InvalidRequestError, match="max_model_len is 512"):
        await anext(llm.generate("the cache " * 30_000))  # long enough to be tokenized in a thread
    stream = llm.generate("the", LONG, request_id="same")
    await anext(stream)
    with pytest.raises(DuplicateRequestError, match="same"):
        await anext(llm.generate("the", LONG, request_id="same"))
    await stream.aclose()
    output = await last_of(llm.chat([{"role": "user", "content": "hi"}], greedy(2)))
    assert "hi" in output.prompt


async def a_full_queue_refuses(llm):
    streams = [llm.generate(f"the {index}", LONG) for index in range(4)]
    for stream in streams:
        await anext(stream)  # all four run, and nothing else can
    waiting = asyncio.create_task(last_of(llm.generate("the", greedy(2, n=4))))
    while (await llm.stats()).num_waiting < 4:
        pass
    with pytest.raises(QueueFullError, match="max_num_queued_reqs 6") as caught:
        await anext(llm.generate("the", greedy(2, n=3)))
    assert caught.value.retry_after > 0
    with pytest.raises(InvalidRequestError, match=r"n is 7.*max_num_queued_reqs 6"):
        await anext(llm.generate("the", greedy(2, n=7)))  # trying again would never help
    for stream in streams:
        await stream.aclose()
    assert len((await waiting).outputs) == 4
    await wait_until_empty(llm)


async def later_parts_of_a_call_wait_for_room(llm):
    streams = [llm.generate(f"the {index}", LONG) for index in range(4)]
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(last_of(llm.generate("the", greedy(2, n=4))))
    while (await llm.stats()).num_waiting < 4:
        pass
    waits = []

    async def note_begin(_):
        return time.monotonic()

    async def make_room(seconds):
        waits.append(seconds)
        for stream in streams:
            await stream.aclose()
        await waiting

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "sleep", make_room)
        output = await last_of(llm.generate("the", greedy(2, n=3), before_submit=note_begin))
    assert [len(one.token_ids) for one in output.outputs] == [2, 2, 2]
    assert len(waits) == 1
    assert waits[0] > 0
    await wait_until_empty(llm)


async def the_timeout_of_later_parts_of_a_call_counts_from_its_beginning(llm):
    seen = []

    async def note(processed):
        seen.append(processed.core_request)
        return begun_at

    begun_at = time.monotonic() - 100.0
    await last_of(llm.generate("the", greedy(2), timeout=1e4, before_submit=note))
    assert 0 < seen[0].options.timeout <= 1e4 - 100.0
    with pytest.raises(RequestTimeoutError, match="99 s after its call"):
        await anext(llm.generate("the", greedy(2), timeout=99.0, before_submit=note))
    await last_of(llm.generate("the", greedy(2), timeout=0.0, before_submit=note))


async def slow_callers_miss_nothing_but_the_middle(llm):
    stream = llm.generate("the", greedy(30))
    first = await anext(stream)
    await last_of(llm.generate("another", greedy(60)))  # meanwhile the first one ends
    rest = [output async for output in stream]
    assert [output.finished for output in rest] == [True], "one output stands for all that was missed"
    assert len(rest[0].outputs[0].token_ids) == 30 > len(first.outputs[0].token_ids)


async def prefixes_are_forgotten(llm):
    prompt = "the cache holds keys and values " * 4
    await last_of(llm.generate(prompt, greedy(1)))
    assert (await last_of(llm.generate(prompt, greedy(1)))).num_cached_tokens > 0
    assert (await last_of(llm.generate(prompt, greedy(1), cache_salt="other"))).num_cached_tokens == 0
    assert await llm.reset_prefix_cache()
    assert (await last_of(llm.generate(prompt, greedy(1)))).num_cached_tokens == 0


async def a_bad_grammar_fails_its_request_alone(llm):
    def structured(regex, n=1):
        params = StructuredOutputsParams(regex=regex)
        return last_of(llm.generate("the", SamplingParams(n=n, seed=1, structured_outputs=params)))

    good, bad, plain = await asyncio.gather(
        structured("[ab]{3}", n=2),
        structured("(", n=2),
        last_of(llm.generate("the", greedy(4))),
        return_exceptions=True,
    )
    assert all(set(one.text) <= set("ab") and len(one.text) == 3 for one in good.outputs)
    assert isinstance(bad, InvalidRequestError)
    assert bad.param == "structured_outputs"
    assert len(plain.outputs[0].token_ids) == 4


async def time_that_is_up_is_an_exception(llm):
    for limit in ("timeout", "queue_timeout"):
        with pytest.raises(RequestTimeoutError, match=limit):
            await anext(llm.generate("the", greedy(4, n=2), **{limit: 1e-9}))
    assert (await llm.stats()).num_timeouts == 4


async def requests_are_explained(llm):
    streams = [llm.generate(f"the {index}", greedy(240), request_id=f"running/{index}") for index in range(2)]
    streams.append(
        llm.generate("the", SamplingParams(n=2, max_tokens=240, ignore_eos=True), request_id="two")
    )
    for stream in streams:
        await anext(stream)
    waiting = asyncio.create_task(last_of(llm.generate("the", greedy(2), request_id="waits")))
    searching = asyncio.create_task(
        last_of(llm.generate("the", greedy(2, beam_width=3), request_id="search"))
    )
    async with asyncio.timeout(60):
        while (await llm.stats()).num_running < 4 or (await llm.stats()).num_waiting < 2:
            pass
    asked = [["running/0"], ["two"], ["waits"], ["search"], ["unknown"], ["unknown", "two", "waits"]]
    states = await llm.explain_all(asked)
    assert [len(sentences) for sentences in states] == [1, 2, 1, 1, 0, 3]
    assert states[0][0].startswith("running: ")
    assert "needs 1 of 4 slots" in states[2][0]
    assert "a request goes first" in states[3][0]
    assert (await llm.explain("waits"))[0].startswith("waiting for ")
    for stream in streams:
        await stream.aclose()
    await asyncio.gather(waiting, searching)
    assert await llm.explain("waits") == []


async def health(llm):
    def check_much_later(watchdog_timeout=60.0):
        supervision = SupervisionConfig(watchdog_timeout=watchdog_timeout)
        with pytest.MonkeyPatch.context() as patched:
            later = time.monotonic() + 120.0
            patched.setattr(llm, "config", dataclasses.replace(llm.config, supervision=supervision))
            patched.setattr(async_llm, "time", types.SimpleNamespace(monotonic=lambda: later))
            llm.check_health()

    llm.check_health()
    check_much_later()  # idle: no step is expected
    stream = llm.generate("the", LONG)
    await anext(stream)
    llm.check_health()
    with pytest.raises(EngineDeadError, match=r"1 requests are unfinished.*60 s \(watchdog_timeout\)"):
        check_much_later()
    check_much_later(watchdog_timeout=600.0)
    check_much_later(watchdog_timeout=0.0)
    await stream.aclose()


async def test_shutdown_aborts_or_drains(checkpoint):
    llm = AsyncLLM(tiny_config(checkpoint))
    stream = llm.generate("the", LONG)
    await anext(stream)
    task = asyncio.create_task(last_of(stream))
    await llm.shutdown()
    assert (await task).outputs[0].finish_reason is FinishReason.ABORT

    llm = AsyncLLM(tiny_config(checkpoint))
    stream = llm.generate("the", greedy(30))
    await anext(stream)
    task = asyncio.create_task(last_of(stream))
    closing = asyncio.create_task(llm.shutdown(drain_timeout=60))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        await anext(llm.generate("late"))
    assert len((await task).outputs[0].token_ids) == 30
    await closing


@pytest.mark.parametrize(
    ("scheduler_cls", "error", "words"),
    [
        ("quire.nothing.Here", ConfigError, "quire.nothing.Here"),
        ("engine_schedulers.BrokenScheduler", QuireError, "RuntimeError: this scheduler is broken"),
    ],
)
async def test_a_failed_start_is_told(checkpoint, scheduler_cls, error, words):
    llm = AsyncLLM(EngineConfig(model=checkpoint, scheduler_cls=scheduler_cls))
    with pytest.raises(error, match=words):
        await llm.wait_until_ready()
    with pytest.raises(error, match=words):
        await anext(llm.generate("the"))
    with pytest.raises(EngineDeadError, match=words):
        llm.check_health()
    await llm.shutdown()


async def test_a_message_that_cannot_be_processed_ends_the_engine_and_is_told(checkpoint, monkeypatch):
    def broken(tokenizer, info):
        raise ValueError("no such tokenizer")

    monkeypatch.setattr(live_requests, "InputProcessor", broken)
    llm = AsyncLLM(tiny_config(checkpoint))
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError, match="no such tokenizer"):
            await llm.wait_until_ready()
        with pytest.raises(EngineDeadError, match="no such tokenizer"):
            await anext(llm.generate("the"))
    with pytest.raises(EngineDeadError, match="no such tokenizer"):
        llm.check_health()
    await llm.shutdown()


async def test_errors_keep_their_class_on_the_way_from_the_engine(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen9ForCausalLM"]}))
    llm = AsyncLLM(tiny_config(str(other)))
    with pytest.raises(UnknownArchitectureError, match="Qwen9"):
        await llm.wait_until_ready()
    await llm.shutdown()


def test_usable_from_one_event_loop_after_another(checkpoint):
    llm = AsyncLLM(tiny_config(checkpoint))
    first = asyncio.run(last_of(llm.generate("the", greedy(4))))

    async def second_and_end():
        output = await last_of(llm.generate("the", greedy(4)))
        await llm.shutdown()
        return output

    assert asyncio.run(second_and_end()).outputs == first.outputs

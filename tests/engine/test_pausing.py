"""An engine that pauses and one that sleeps: nothing is lost, and tokens are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest
import uvloop

from engine_checks import TINY, engine_pid, requests_of, tiny_config, wait_for_end
from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import EngineAsleepError, EngineDeadError, InvalidRequestError
from quire.status import FinishReason

PROMPTS = ["the cache", "a block of keys", "one token"]
PARAMS = [
    SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=200, seed=1, n=2, ignore_eos=True),
    SamplingParams(max_tokens=40, beam_width=3, n=2, ignore_eos=True),
]
pytestmark = [pytest.mark.usefixtures("preloaded_engines"), pytest.mark.processes]


@pytest.fixture(scope="module")
def expected(checkpoint):
    with LLM(checkpoint, **TINY) as llm:
        return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
async def llm(checkpoint, slow_steps):
    config = tiny_config(checkpoint)
    llm = AsyncLLM(dataclasses.replace(config, scheduler_cls="engine_schedulers.SlowScheduler"))
    await llm.wait_until_ready()
    async with asyncio.timeout(90):
        yield llm
    await llm.shutdown()


class Call:
    """A request in a task of its own."""

    def __init__(self, llm, number):
        self.num_tokens = 0
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(llm.generate(PROMPTS[number], PARAMS[number])))

    async def _run(self, stream):
        async for output in stream:
            self.num_tokens = len(output.outputs[0].token_ids)
            self.has_begun.set()
        return output.outputs


async def begun(llm):
    """Begin one request of each kind; return when those that stream have had tokens."""
    calls = [Call(llm, number) for number in range(len(PROMPTS))]
    for call in calls[:2]:
        await call.has_begun.wait()
    return calls


def live_ids(llm):
    return [[state.request_id] for state in requests_of(llm).outputs.live_requests()]


async def results(calls):
    return [await call.task for call in calls]


async def test_a_pause_keeps_everything_also_if_the_engine_dies_in_it(llm, slow_steps, expected):
    slow_steps.touch()
    calls = await begun(llm)
    assert not await llm.pause_generation("keep")
    assert await llm.is_paused()
    before = [call.num_tokens for call in calls]
    calls.append(Call(llm, 0))
    pid = engine_pid()
    for [sentence, *_] in await llm.explain_all(live_ids(llm)):
        assert "paused" in sentence
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_for_end, pid)
    while llm.recovery_stats.num_restarts < 1 or not requests_of(llm).is_ready:
        await asyncio.sleep(0.01)
    await llm.stats()
    assert [call.num_tokens for call in calls] == [*before, 0]
    slow_steps.unlink()
    await llm.resume_generation()
    assert not await llm.is_paused()
    assert await results(calls) == [*expected, expected[0]]


@pytest.mark.representative
async def test_a_pause_waits_for_what_runs_or_aborts_it(llm, slow_steps, expected):
    calls = await begun(llm)
    assert await llm.pause_generation("wait")
    assert await results(calls) == expected
    late = Call(llm, 0)
    assert (await llm.stats()).num_running == 0
    assert "paused" in (await llm.explain_all(live_ids(llm)))[0][0]
    await llm.resume_generation()
    assert await late.task == expected[0]
    slow_steps.touch()
    calls = await begun(llm)
    assert not await llm.pause_generation(clear_cache=False)
    for outputs in await results(calls):
        assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}
    await llm.resume_generation()


async def test_sleep_ends_the_engine_and_keeps_requests(llm, slow_steps, expected):
    slow_steps.touch()
    calls = await begun(llm)
    pid = engine_pid()
    await llm.sleep("keep")
    await asyncio.to_thread(wait_for_end, pid)
    assert await llm.is_sleeping()
    await llm.sleep()
    for refused in (llm.stats, llm.reset_prefix_cache, Call(llm, 0).task):
        with pytest.raises(EngineAsleepError, match="/wake_up"):
            await (refused() if callable(refused) else refused)
    with pytest.raises(EngineAsleepError):
        llm.check_health()
    slow_steps.unlink()
    waking = asyncio.create_task(llm.wake_up())
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match=r"^the engine is being restarted; live"):
        llm.check_health()
    await waking
    await llm.wake_up()
    assert await results(calls) == expected
    assert llm.recovery_stats.num_restarts == llm.recovery_stats.num_quarantined_requests == 0


async def test_sleep_waits_for_requests_or_aborts_them(llm, slow_steps, expected):
    calls = await begun(llm)
    falling_asleep = asyncio.create_task(llm.sleep("wait"))
    await asyncio.sleep(0)
    with pytest.raises(EngineAsleepError):
        await Call(llm, 0).task
    await falling_asleep
    assert await results(calls) == expected
    await llm.pause_generation("keep")
    await llm.wake_up()
    assert await llm.is_paused()
    with pytest.raises(InvalidRequestError, match="paused"):
        await llm.sleep("wait")
    llm.check_health()
    await llm.resume_generation()
    slow_steps.touch()
    calls = await begun(llm)
    await llm.sleep()
    for outputs in await results(calls):
        assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}


def test_wakes_up_on_uvloop_among_other_calls(checkpoint, expected):
    """Its handles of timers that are due already do not say when they were."""

    async def run():
        llm = AsyncLLM(tiny_config(checkpoint))
        await llm.sleep()
        await asyncio.gather(llm.wake_up(), llm.wait_until_ready())
        outputs = await results([Call(llm, number) for number in range(len(PROMPTS))])
        await llm.shutdown()
        return outputs

    assert uvloop.run(run()) == expected

"""A call of many prompts leaves the event loop its turns."""

import asyncio
from collections import Counter

import pytest

from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestOutput
from quire.server.calls.outputs import PREPARED_AT_ONCE, CallOutputs
from quire.status import FinishReason


def finished_output(index):
    completion = CompletionOutput(0, "x", [1], None, finish_reason=FinishReason.LENGTH)
    return RequestOutput(f"request-{index}", "a", [1], [completion], finished=True)


def outputs_of(streams, preparing, places=None):
    return CallOutputs(
        streams,
        fields=lambda: [{}] * len(streams),
        observers=(),
        hooks=(),
        preparing=preparing,
        places=places or asyncio.Semaphore(),
        was_aborted=lambda: False,
    )


async def test_the_prompts_of_a_call_start_a_few_per_turn_of_the_loop():
    turn = 0
    started = Counter()

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def stream(index):
        started[turn] += 1
        preparing.release()
        yield finished_output(index)

    preparing = asyncio.Semaphore(PREPARED_AT_ONCE)
    counting = asyncio.create_task(count_turns())
    num_prompts = 10 * PREPARED_AT_ONCE + 1
    async with outputs_of([stream(index) for index in range(num_prompts)], preparing) as outputs:
        served = [index async for index, _ in outputs]
    counting.cancel()
    assert sorted(served) == list(range(num_prompts))
    assert max(started.values()) == PREPARED_AT_ONCE
    assert sum(started.values()) == num_prompts


async def test_the_next_prompts_start_as_those_before_are_prepared():
    most = running = 0

    async def stream(index):
        nonlocal most, running
        running += 1
        most = max(most, running)
        for _ in range(5):  # as a text that waits for a thread
            await asyncio.sleep(0)
        running -= 1
        preparing.release()
        yield finished_output(index)

    preparing = asyncio.Semaphore(PREPARED_AT_ONCE)
    async with outputs_of([stream(index) for index in range(50)], preparing) as outputs:
        assert len([index async for index, _ in outputs]) == 50
    assert most == PREPARED_AT_ONCE


async def test_no_more_prompts_are_live_than_may_be():
    most = running = 0

    async def stream(index):
        nonlocal most, running
        preparing.release()
        await places.acquire()
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        yield finished_output(index)

    preparing, places = asyncio.Semaphore(PREPARED_AT_ONCE), asyncio.Semaphore(3)
    async with outputs_of([stream(index) for index in range(20)], preparing, places) as outputs:
        assert sorted([index async for index, _ in outputs]) == list(range(20))
    assert most == 3


async def test_a_bad_prompt_is_refused_while_the_first_ones_are_computed():
    async def stream(index):
        preparing.release()
        if index == 19:
            raise InvalidRequestError("too long")
        await places.acquire()
        await asyncio.Event().wait()
        yield

    preparing, places = asyncio.Semaphore(PREPARED_AT_ONCE), asyncio.Semaphore(3)
    async with outputs_of([stream(index) for index in range(20)], preparing, places) as outputs:
        with pytest.raises(InvalidRequestError, match="too long"):
            await anext(outputs)


async def test_what_a_failed_request_has_generated_comes_before_the_failure():
    failed = CompletionOutput(
        0,
        "x",
        [1],
        None,
        finish_reason=FinishReason.ERROR,
        error="too deep",
        error_type="InvalidRequestError",
        error_param="structured_outputs",
    )
    observed, hooked = [], []

    async def stream():
        yield RequestOutput("request-0", "a", [1], [failed], finished=True)

    outputs = CallOutputs(
        [stream()],
        fields=lambda: [{"structured_outputs": "response_format"}],
        observers=[lambda index, output: observed.append(output.outputs[0].finish_reason)],
        hooks=[lambda index, output: hooked.append(output.outputs[0].finish_reason)],
        preparing=asyncio.Semaphore(),
        places=asyncio.Semaphore(),
        was_aborted=lambda: False,
    )
    async with outputs:
        index, output = await anext(outputs)
        assert (index, output.outputs[0].text, output.finished) == (0, "x", False)
        with pytest.raises(InvalidRequestError, match="response_format: too deep") as raised:
            await anext(outputs)
    assert raised.value.param == "response_format"
    assert (observed, hooked) == ([FinishReason.ERROR], [None])


async def test_the_end_of_the_context_closes_a_stream_that_is_being_read():
    closed = False

    async def stream():
        nonlocal closed
        try:
            yield RequestOutput("request-0", "a", [1], [CompletionOutput(0, "x", [1], None)], finished=False)
            await asyncio.Event().wait()
        finally:
            closed = True

    async with outputs_of([stream()], asyncio.Semaphore()) as outputs:
        await anext(outputs)
    assert closed

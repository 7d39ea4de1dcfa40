"""A call of many prompts leaves the event loop its turns."""

import asyncio
import contextlib
from collections import Counter

from quire.request_output import CompletionOutput, RequestOutput
from quire.server.generation import STARTED_PER_TURN, generate
from quire.server.live_calls import LiveCalls
from quire.server.metrics import Metrics
from quire.server.tenant_metrics import TenantFigures
from quire.status import FinishReason


def finished_output(index):
    completion = CompletionOutput(0, "x", [1], None, finish_reason=FinishReason.LENGTH)
    return RequestOutput(f"request-{index}", "a", [1], [completion], finished=True)


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
        yield finished_output(index)

    counting = asyncio.create_task(count_turns())
    num_prompts = 10 * STARTED_PER_TURN + 1
    outputs = generate(
        [stream(index) for index in range(num_prompts)],
        call_id="call",
        request_ids=[f"request-{index}" for index in range(num_prompts)],
        num_sequences=1,
        calls=LiveCalls(),
        metrics=Metrics("fake"),
        tenant=TenantFigures(),
    )
    async with contextlib.aclosing(outputs):
        served = [index async for index, _ in outputs]
    counting.cancel()
    assert sorted(served) == list(range(num_prompts))
    assert max(started.values()) == STARTED_PER_TURN
    assert sum(started.values()) == num_prompts

"""However many log-probabilities an answer has, the event loop has turns for others meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from call_through import call_through
from quire.front.text.detokenizer import DecoderFactory
from quire.request_output import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from quire.server.calls import logprobs
from quire.server.calls.logprobs import CompletionLogprobsWriter, chat_logprobs, prompt_logprobs
from tokenizers_for_tests import byte_level

NUM_TOKENS = 40
COUNT = 3
TOKENIZER = byte_level()


def candidates(token_id: int) -> TokenLogprobs:
    return {token_id + rank: Logprob(-1.0, rank + 1, "x") for rank in range(COUNT)}


TOKEN_IDS = list(range(5, 5 + NUM_TOKENS))
POSITIONS = [candidates(token_id) for token_id in TOKEN_IDS]
COMPLETION = CompletionOutput(0, "", TOKEN_IDS, POSITIONS)
OUTPUT = RequestOutput("r", "", TOKEN_IDS, [COMPLETION], POSITIONS)


def writer() -> CompletionLogprobsWriter:
    return CompletionLogprobsWriter(
        TOKENIZER, DecoderFactory(TOKENIZER), COUNT, prompt_token_ids=[], skip_special_tokens=True
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda: chat_logprobs(TOKENIZER, COMPLETION, 0, COUNT),
        lambda: prompt_logprobs(OUTPUT, COUNT),
        lambda: writer().prompt(OUTPUT, ""),
        lambda: writer().output(COMPLETION, 0),
    ],
    ids=["chat", "prompt", "echo", "completion"],
)
async def test_a_turn_has_a_bounded_number(
    write: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGPROBS_PER_TURN", 4 * (COUNT + 1))
    turn, in_turns = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def counted(finite: Callable[[float], float], logprob: float) -> float:
        in_turns[turn] += 1
        return finite(logprob)

    call_through(monkeypatch, logprobs, "_finite", counted)
    counting = asyncio.ensure_future(count_turns())
    await write()
    counting.cancel()
    assert sum(in_turns.values()) >= NUM_TOKENS * COUNT
    assert max(in_turns.values()) <= 4 * (COUNT + 2)

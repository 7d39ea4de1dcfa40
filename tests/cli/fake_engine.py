"""Engines without a model, for tests of the command line."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.request_output import CompletionOutput, RequestMetrics, RequestOutput
from quire.sampling_params import SamplingParams
from quire.status import FinishReason


def finished_output(
    text: str, *, prompt_tokens: int = 4, cached_tokens: int = 0, index: int = 0
) -> RequestOutput:
    """Return the last output of a request whose answer has one token per word."""
    completion = CompletionOutput(
        index, text, list(range(len(text.split()))), finish_reason=FinishReason.STOP
    )
    return RequestOutput(
        "request",
        None,
        [1] * prompt_tokens,
        [completion],
        num_cached_tokens=cached_tokens,
        finished=True,
        metrics=RequestMetrics(0.1, 0.2, len(completion.token_ids)),
    )


class FakeTokenizer:
    """One token per word."""

    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text.split())))

    def check_chat_template(self) -> None:
        """Find nothing wrong."""


class FakeAsyncLLM:
    """Answers with the prompt's words, one output per word, in upper case for a chat.

    A prompt that contains "refuse" is refused.
    """

    instances: list[FakeAsyncLLM]

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = FakeTokenizer()
        self.info = types.SimpleNamespace(model=config.model, max_model_len=4096)
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.is_shut_down = False
        type(self).instances.append(self)

    async def wait_until_ready(self, on_progress: Any = None) -> None:
        pass

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        self.is_shut_down = True

    async def tokenize_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [1] * sum(len(message["content"].split()) for message in messages)

    async def generate(self, prompt: str, sampling_params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.seen.append((prompt, sampling_params))
        async for output in self.answer(prompt, sampling_params):
            yield output

    async def chat(
        self, messages: list[dict[str, Any]], sampling_params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        self.seen.append(([dict(message) for message in messages], sampling_params))
        async for output in self.answer(messages[-1]["content"].upper(), sampling_params):
            yield output

    async def answer(self, text: str, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        if "refuse" in text.lower():
            raise InvalidRequestError("prompt has 9 tokens; the limit is 8", param="prompt")
        words = text.split()
        for count in range(1, len(words) + 1):
            output = finished_output(" ".join(words[:count]))
            output.finished = count == len(words)
            output.outputs = [
                CompletionOutput(
                    index,
                    " ".join(words[:count]),
                    list(range(count)),
                    finish_reason=FinishReason.STOP if output.finished else None,
                )
                for index in range(params.n)
            ]
            yield output


def install_fake_async_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeAsyncLLM]:
    """Put the fake where commands import `AsyncLLM` from, and have them start no process ahead."""
    FakeAsyncLLM.instances = []
    for command in ("quire.cli.commands.chat", "quire.cli.commands.generate"):
        monkeypatch.setattr(f"{command}.started_ahead", contextlib.nullcontext)
    module = types.ModuleType("quire.front.async_llm")
    module.AsyncLLM = FakeAsyncLLM
    monkeypatch.setitem(sys.modules, "quire.front.async_llm", module)
    return FakeAsyncLLM

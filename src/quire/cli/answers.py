"""How `quire generate` shows answers: as text that streams, or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from quire.cli.ordered_streams import OrderedStreams
from quire.cli.prompts import Prompt
from quire.request_output import RequestOutput, TokenLogprobs


class Answers(Protocol):
    """Takes what the engine says about each prompt, in any order, and writes it in the prompts' order."""

    def update(self, index: int, output: RequestOutput) -> None:
        """Take the newest output of prompt `index`."""

    def fail(self, index: int, error: str) -> None:
        """Take note that prompt `index` gets no further output."""


class TextAnswers:
    """Plain text that streams, with the prompt above each answer if there are several.

    Args:
        stream: where to write.
        prompts: the prompts, in order.
        completions: how many answers each prompt gets.
    """

    def __init__(self, stream: TextIO, prompts: list[Prompt], *, completions: int) -> None:
        self._completions = completions
        several = len(prompts) > 1
        headings = []
        for number, prompt in enumerate(prompts):
            above = f"{chr(10) if number else ''}> {prompt.text}\n" if several else ""
            for index in range(completions):
                label = f"[{index}] " if completions > 1 else ""
                headings.append((above if index == 0 else "") + label)
        self._lanes = OrderedStreams(stream, headings)

    def update(self, index: int, output: RequestOutput) -> None:
        """Write what is new and next in order."""
        for completion in output.outputs:
            lane = index * self._completions + completion.index
            self._lanes.update(lane, completion.text, finished=completion.finished)

    def fail(self, index: int, error: str) -> None:
        """End the prompt's answers where they are."""
        for lane in range(index * self._completions, (index + 1) * self._completions):
            self._lanes.finish(lane)

    def close(self) -> None:
        """End the line of an answer that was cut by the end of the engine, or by Ctrl-C."""
        self._lanes.close()


class JsonAnswers:
    """One JSON object per prompt and line, written when it is complete."""

    def __init__(self, stream: TextIO, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self._lanes = OrderedStreams(stream, [""] * len(prompts))

    def update(self, index: int, output: RequestOutput) -> None:
        """Write the prompt's line if it has finished."""
        if output.finished:
            self._write(index, answer_record(output))

    def fail(self, index: int, error: str) -> None:
        """Write a line that holds the error."""
        self._write(index, {"error": error})

    def _write(self, index: int, record: dict[str, Any]) -> None:
        prompt = self._prompts[index]
        asked = {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}
        line = json.dumps({"index": index, **asked, **record}, ensure_ascii=False)
        self._lanes.update(index, line, finished=True)


def answer_record(output: RequestOutput) -> dict[str, Any]:
    """Return what a line of output says about a finished request besides its prompt."""
    completions = [
        {
            "text": completion.text,
            "num_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **({"logprobs": _as_lists(completion.logprobs)} if completion.logprobs else {}),
            **({"error": completion.error} if completion.error else {}),
        }
        for completion in output.outputs
    ]
    record: dict[str, Any] = {
        "outputs": completions,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if output.prompt_logprobs:
        record["prompt_logprobs"] = _as_lists(output.prompt_logprobs)
    return record


def _as_lists(positions: Sequence[TokenLogprobs | None]) -> list[list[dict[str, Any]] | None]:
    """Return for each position its candidates, the likeliest first; None where nothing is known."""
    return [_by_rank(candidates) if candidates else None for candidates in positions]


def _by_rank(candidates: TokenLogprobs) -> list[dict[str, Any]]:
    ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
    return [
        {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token, entry in ranked
    ]

"""Writing the answers of `quire generate`: as streaming text, or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from quire.cli.prompts import InputPrompt
from quire.request_output import RequestOutput, TokenLogprobs


class AnswerWriter(Protocol):
    """Takes the engine's outputs in any order, and writes the answers in the order of the prompts."""

    def update(self, index: int, output: RequestOutput) -> None:
        """Take the latest output of prompt `index`."""

    def fail(self, index: int, error: str) -> None:
        """Take the error that ended prompt `index`; no further output follows."""


class TextAnswerWriter:
    """Streams plain text; with several prompts, each answer is preceded by its prompt.

    Args:
        stream: where to write.
        prompts: the prompts, in order.
        completions: number of completions per prompt.
    """

    def __init__(self, stream: TextIO, prompts: list[InputPrompt], *, completions: int) -> None:
        self._completions = completions
        several = len(prompts) > 1
        headings = []
        for number, prompt in enumerate(prompts):
            above = f"{chr(10) if number else ''}> {prompt.text}\n" if several else ""
            for index in range(completions):
                label = f"[{index}] " if completions > 1 else ""
                headings.append((above if index == 0 else "") + label)
        self._streams = OrderedStreams(stream, headings)

    def update(self, index: int, output: RequestOutput) -> None:
        """Write the new text of each completion, as soon as it is its turn."""
        for completion in output.outputs:
            stream_index = index * self._completions + completion.index
            self._streams.update(stream_index, completion.text, finished=completion.finished)

    def fail(self, index: int, error: str) -> None:
        """End the answers to this prompt with their text so far."""
        for stream_index in range(index * self._completions, (index + 1) * self._completions):
            self._streams.finish(stream_index)

    def close(self) -> None:
        """End the line if an answer was interrupted, by Ctrl-C or because the engine ended."""
        self._streams.close()


class JsonAnswerWriter:
    """Writes one JSON object per line for each prompt, once its output is complete."""

    def __init__(self, stream: TextIO, prompts: list[InputPrompt]) -> None:
        self._prompts = prompts
        self._streams = OrderedStreams(stream, [""] * len(prompts))

    def update(self, index: int, output: RequestOutput) -> None:
        """Write the prompt's line if it has finished."""
        if output.finished:
            self._write(index, output_record(output))

    def fail(self, index: int, error: str) -> None:
        """Write a line with the error."""
        self._write(index, {"error": error})

    def _write(self, index: int, record: dict[str, Any]) -> None:
        prompt = self._prompts[index]
        asked = {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}
        line = json.dumps({"index": index, **asked, **record}, ensure_ascii=False)
        self._streams.update(index, line, finished=True)


def output_record(output: RequestOutput) -> dict[str, Any]:
    """Return the fields of an output line for a finished request, without its prompt."""
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
    """Return the candidates at each position, most likely first; None where there are none."""
    return [_by_rank(candidates) if candidates else None for candidates in positions]


def _by_rank(candidates: TokenLogprobs) -> list[dict[str, Any]]:
    ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
    return [
        {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token, entry in ranked
    ]


class OrderedStreams:
    """Writes concurrently growing texts as if they were generated one after another.

    The first unfinished text is written as it grows; later ones are held back until it is their turn.

    Args:
        stream: where to write; flushed after every write.
        headings: heading of each text; "": none.
    """

    def __init__(self, stream: TextIO, headings: list[str]) -> None:
        self._stream = stream
        self._headings = headings
        self._texts = [""] * len(headings)
        self._finished = [False] * len(headings)
        self._current = 0
        self._written: int | None = None  # characters of the current text; None before its heading

    def update(self, index: int, text: str, *, finished: bool) -> None:
        """Set text `index` to `text`, which extends its previous value, and write what can be written."""
        self._texts[index] = text
        self._finished[index] = finished
        if index == self._current:
            self._write()

    def finish(self, index: int) -> None:
        """Mark text `index` as complete."""
        self.update(index, self._texts[index], finished=True)

    def close(self) -> None:
        """End the line if a text was interrupted."""
        if self._written is not None:
            self._written = None
            self._stream.write("\n")
            self._stream.flush()

    def _write(self) -> None:
        while self._current < len(self._texts):
            text = self._texts[self._current]
            finished = self._finished[self._current]
            if not text and not finished:
                break
            if self._written is None:
                self._stream.write(self._headings[self._current])
                self._written = 0
            self._stream.write(text[self._written :])
            self._written = len(text)
            if not finished:
                break
            if text or self._headings[self._current]:
                self._stream.write("\n")
            self._current += 1
            self._written = None
        self._stream.flush()

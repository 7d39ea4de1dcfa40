"""Log-probabilities in the two forms that OpenAI defines for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest
from quire.request_output import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from quire.server.wire.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenIdLogprob,
    TokenIdLogprobs,
    TokenLogprob,
    TopLogprob,
    TopTokenId,
)

if TYPE_CHECKING:
    from quire.front.text.detokenizer import DecoderFactory, TokenDecoder
    from quire.models.text.tokenizer import Tokenizer


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express; OpenAI's value."""

LOGPROBS_PER_TURN = 1024
"""Log-probabilities written per turn of the event loop; each takes a few microseconds."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _likeliest(candidates: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` likeliest tokens with their ids."""
    return sorted(candidates.items(), key=lambda candidate: candidate[1].rank)[:count]


def _text_or_bytes(token: bytes) -> tuple[str, bool]:
    """Return a token's text and True, or, if it is not valid UTF-8, its escaped bytes and False."""
    try:
        return token.decode(), True
    except UnicodeDecodeError:
        return repr(token)[2:-1], False


T = TypeVar("T")


async def _in_turns(positions: Iterable[T], count: int) -> AsyncIterator[T]:
    """Yield positions with `count` candidates each, a bounded number per turn of the event loop."""
    positions_per_turn = max(1, LOGPROBS_PER_TURN // (count + 1))
    for number, position in enumerate(positions, 1):
        yield position
        if number % positions_per_turn == 0:
            await asyncio.sleep(0)


async def chat_logprobs(
    tokenizer: Tokenizer, completion: CompletionOutput, start: int, count: int, *, names_ids: bool = False
) -> ChatLogprobs | None:
    """Return the chat form for the tokens from `start` on, each with `count` likeliest ones.

    With `names_ids`, tokens are named by their ids.
    """
    if completion.logprobs is None:
        return None

    def fields(token_id: int, candidate: Logprob) -> dict[str, Any]:
        token = tokenizer.token_bytes.of(token_id)
        name = token_id_name(token_id) if names_ids else _text_or_bytes(token)[0]
        return {"token": name, "logprob": _finite(candidate.logprob), "bytes": list(token)}

    content = []
    pairs = zip(completion.token_ids[start:], completion.logprobs[start:], strict=True)
    async for token_id, candidates in _in_turns(pairs, count):
        top = [TopLogprob(**fields(*candidate)) for candidate in _likeliest(candidates, count)]
        content.append(TokenLogprob(**fields(token_id, candidates[token_id]), top_logprobs=top))
    return ChatLogprobs(content=content)


async def token_id_logprobs(completion: CompletionOutput, start: int, count: int) -> TokenIdLogprobs | None:
    """Return the form by id for the tokens from `start` on, each with `count` likeliest ones."""
    if completion.logprobs is None:
        return None
    content = []
    pairs = zip(completion.token_ids[start:], completion.logprobs[start:], strict=True)
    async for token_id, candidates in _in_turns(pairs, count):
        top = [TopTokenId(**_id_fields(*candidate)) for candidate in _likeliest(candidates, count)]
        content.append(TokenIdLogprob(**_id_fields(token_id, candidates[token_id]), top_logprobs=top))
    return TokenIdLogprobs(content=content)


def _id_fields(token_id: int, candidate: Logprob) -> dict[str, Any]:
    name, logprob = token_id_name(token_id), _finite(candidate.logprob)
    return {"token": name, "token_id": token_id, "logprob": logprob, "rank": candidate.rank}


def token_id_name(token_id: int) -> str:
    """Return vLLM's name of a token whose text is not wanted, or is not unique."""
    return f"token_id:{token_id}"


async def prompt_logprobs(output: RequestOutput, count: int) -> PromptLogprobs:
    """Return vLLM's form for the tokens of a prompt, each with `count` likeliest ones."""
    by_token: PromptLogprobs = []
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    async for token_id, candidates in _in_turns(pairs, count):
        by_token.append(None if candidates is None else _candidates_by_id(token_id, candidates, count))
    return by_token


def _candidates_by_id(token_id: int, candidates: TokenLogprobs, count: int) -> dict[str, PromptLogprob]:
    return {
        str(one): PromptLogprob(
            logprob=_finite(candidate.logprob), rank=candidate.rank, decoded_token=candidate.decoded_token
        )
        for one, candidate in candidates.items()
        if one == token_id or candidate.rank <= count
    }


class CompletionLogprobsWriter:
    """Builds the completions form for one choice, piece by piece, keeping the running text offset.

    A token that completes no character has length 0 in the text; the one that does has the whole character.
    Its name is then `bytes:` and its bytes, as in OpenAI's API. Where two candidates have the same bytes, the
    one that was not chosen, or is less likely, is named by its id, so that names are unique.

    Args:
        tokenizer: names the tokens.
        decoders: makes decoders of the same tokenizer.
        count: how many of the likeliest tokens to list at each position, besides the chosen one.
        prompt_token_ids: token ids of the prompt.
        skip_special_tokens: whether special tokens are left out of the text, and so have length 0.
        is_verbatim: whether the output keeps its leading space.
        names_ids: whether tokens are named by their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoders: DecoderFactory,
        count: int,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        is_verbatim: bool = False,
        names_ids: bool = False,
    ) -> None:
        self._names_ids = names_ids
        self._tokenizer = tokenizer
        self._count = count
        self._of_prompt = decoders.make((), skip_special_tokens=False)
        self._of_output = decoders.make(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, is_verbatim=is_verbatim
        )
        self._end = 0  # of the text so far

    async def prompt(
        self, output: RequestOutput, text: str, starts: Sequence[int] | None = None
    ) -> CompletionLogprobs:
        """Return the entries of an echoed prompt whose text is `text`.

        Args:
            output: output with the prompt's log-probabilities.
            text: the echoed text.
            starts: text offsets of the prompt's tokens; None: derived by decoding them.
        """
        positions = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        written = _empty()
        pairs = enumerate(zip(output.prompt_token_ids, positions, strict=True))
        async for index, (token_id, candidates) in _in_turns(pairs, self._count):
            start = self._end
            if starts is not None:
                start = starts[index]
            elif self._is_shown(token_id, text):
                start = self._place(self._of_prompt, token_id)
            self._add(written, token_id, candidates, start)
        self._end = len(text)
        return written

    async def output(self, completion: CompletionOutput, start: int) -> CompletionLogprobs | None:
        """Return the entries of the generated tokens from `start` on."""
        if completion.logprobs is None:
            return None
        written = _empty()
        pairs = zip(completion.token_ids[start:], completion.logprobs[start:], strict=True)
        async for token_id, candidates in _in_turns(pairs, self._count):
            self._add(written, token_id, candidates, self._place(self._of_output, token_id))
        return written

    def _place(self, decoder: TokenDecoder, token_id: int) -> int:
        """Add a token to the text; return its offset, after earlier invalid bytes."""
        start, new = self._end, decoder.push(token_id)
        self._end += len(new)
        own = self._tokenizer.token_text(token_id)
        return self._end - len(own) if own and new.endswith(own) else start

    def _is_shown(self, token_id: int, text: str) -> bool:
        return token_id not in self._tokenizer.special_token_ids or text.startswith(
            self._tokenizer.token_text(token_id), self._end
        )

    def _name(self, token_id: int) -> str:
        if self._names_ids:
            return token_id_name(token_id)
        name, is_text = _text_or_bytes(self._tokenizer.token_bytes.of(token_id))
        return name if is_text else f"bytes:{name}"

    def _add(
        self, written: CompletionLogprobs, token_id: int, candidates: TokenLogprobs | None, start: int
    ) -> None:
        name = self._name(token_id)
        written.tokens.append(name)
        written.text_offset.append(start)
        if candidates is None:
            written.token_logprobs.append(None)
            written.top_logprobs.append(None)
            return
        figure = _finite(candidates[token_id].logprob)
        written.token_logprobs.append(figure)
        top = {name: figure}
        for other_id, candidate in _likeliest(candidates, self._count):
            if other_id != token_id:
                other = self._name(other_id)
                top[token_id_name(other_id) if other in top else other] = _finite(candidate.logprob)
        written.top_logprobs.append(top)


def _empty() -> CompletionLogprobs:
    return CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])


def joined(parts: Sequence[CompletionLogprobs | None]) -> CompletionLogprobs | None:
    """Return one object with the entries of all `parts` in order; None if there are none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    whole = _empty()
    for part in present:
        whole.tokens += part.tokens
        whole.text_offset += part.text_offset
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
    return whole


class LogprobLimit:
    """Counts the log-probabilities, or scores of tokens, that a call asks for, prompt by prompt.

    Args:
        limit: maximum number of them.
        labels_of_tokens: how many labels of each token the model scores.
    """

    def __init__(self, limit: int, labels_of_tokens: int = 0) -> None:
        self._limit = limit
        self._labels_of_tokens = labels_of_tokens
        self._num = 0

    def admit(self, processed: ProcessedRequest) -> None:
        """Count those of one more prompt, without those that only ranking needs.

        Raises:
            InvalidRequestError: the call asks for too many.
        """
        request, params = processed.core_request, processed.params
        if self._labels_of_tokens:
            self._admit_scores(len(request.prompt_token_ids))
        if params.logprobs is not None:
            num_tokens = len(request.sequence_ids) * (params.max_tokens or 0)
            self._num += num_tokens * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            self._num += len(request.prompt_token_ids) * (params.prompt_logprobs + 1)
        if self._num > self._limit:
            raise InvalidRequestError(
                f"the request asks for {self._num} log-probabilities or more, and the limit is {self._limit} "
                "(max_logprobs_per_request): completions times tokens times candidates for each; lower n, "
                "max_tokens, logprobs or the number of prompts",
                param="logprobs",
            )

    def _admit_scores(self, num_tokens: int) -> None:
        self._num += num_tokens * self._labels_of_tokens
        if self._num > self._limit:
            raise InvalidRequestError(
                f"the request asks for {self._num} scores of tokens or more, and the limit is {self._limit} "
                f"(max_logprobs_per_request): tokens times {self._labels_of_tokens} labels; send fewer or "
                "shorter inputs"
            )

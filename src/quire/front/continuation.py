"""Requests that another server has begun: their outputs so far are repeated, and an engine continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest
from quire.scheduling.outputs import EngineCoreOutput
from quire.status import FinishReason
from quire.step import PositionLogprobs

PARAM = "outputs_so_far"

OUTPUTS_PER_TURN = 64
"""Outputs repeated per turn of the event loop."""


class SequenceOutput(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """What one sequence has gained in one output of its request.

    Args:
        index: which of the request's completions it is.
        token_ids: its new tokens.
        finish_reason: why it has ended; None: it has not.
        stop_reason: as in `CompletionOutput`.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def require_continuable(
    processed: ProcessedRequest, outputs: Sequence[Sequence[SequenceOutput]], vocab_size: int
) -> None:
    """Raise `InvalidRequestError` unless the outputs so far can be those of a request that goes on."""
    params = processed.params
    if params.beam_width or params.num_sequences != params.n or params.prompt_logprobs is not None:
        raise _refusal("a beam search, best_of and prompt_logprobs cannot be continued")
    num_tokens: Counter[int] = Counter()
    ended: set[int] = set()
    for one in (one for output in outputs for one in output):
        if not 0 <= one.index < params.n:
            raise _refusal(f"it has completion {one.index} of {params.n}")
        if one.index in ended:
            raise _refusal(f"completion {one.index} goes on after its end")
        if not all(0 <= token_id < vocab_size for token_id in one.token_ids):
            raise _refusal(f"it has token ids outside the vocabulary of {vocab_size}")
        num_tokens[one.index] += len(one.token_ids)
        if one.finish_reason is not None:
            ended.add(one.index)
    limit = params.max_tokens or 0
    for index, count in num_tokens.items():
        if count > limit or (count == limit and index not in ended):
            raise _refusal(f"completion {index} has {count} tokens, and max_tokens is {limit}")


def repeated(processed: ProcessedRequest, output: Sequence[SequenceOutput]) -> list[EngineCoreOutput]:
    """Return an output as an engine would send it, with log-probabilities of 0 where they are requested."""
    core_request = processed.core_request
    has_logprobs = core_request.sampling_params.logprobs is not None
    return [
        EngineCoreOutput(
            core_request.sequence_ids[one.index],
            one.token_ids,
            # The text of all tokens is searched for the stop string that has ended it.
            finish_reason=FinishReason.LENGTH if isinstance(one.stop_reason, str) else one.finish_reason,
            stop_reason=None if isinstance(one.stop_reason, str) else one.stop_reason,
            logprobs=[PositionLogprobs([one], [0.0], [1]) for one in one.token_ids] if has_logprobs else None,
        )
        for one in output
    ]


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the request cannot be continued: {reason}", param=PARAM)

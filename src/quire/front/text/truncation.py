"""Truncation of prompts on the left or the right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import tokenizers

    from quire.engine.messages import EngineInfo
    from quire.models.text.command_tokens import TokenList

TruncationSide = Literal["left", "right"]

MARGIN = 64
"""Tokens beside a cut that may differ from those of the whole text, and are not kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens of a prompt are kept: the last `num_tokens`, or the first if `side` is right."""

    num_tokens: int
    side: TruncationSide = "left"

    def part(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the kept tokens of a prompt."""
        return items[-self.num_tokens :] if self.side == "left" else items[: self.num_tokens]

    def within_added(self, encoding: tokenizers.Encoding | TokenList) -> tuple[list[int], slice]:
        """Return the kept tokens, and the slice of them that comes from the text itself.

        Special tokens around the text are kept around the truncated text, if they fit.
        """
        is_added, ids = encoding.special_tokens_mask, encoding.ids
        head = next((at for at, added in enumerate(is_added) if not added), len(ids))
        end = next((at for at in range(len(ids), head, -1) if not is_added[at - 1]), head)
        room = self.num_tokens - head - (len(ids) - end)
        if room <= 0:
            kept = list(self.part(ids))
            return kept, slice(0, len(kept))
        text = Truncation(room, self.side).part(ids[head:end])
        return [*ids[:head], *text, *ids[end:]], slice(head, head + len(text))


def truncation_of(
    num_tokens: int | None, side: TruncationSide, params: SamplingParams, info: EngineInfo
) -> Truncation | None:
    """Return the truncation that a request asks for.

    Args:
        num_tokens: prompt tokens to keep; -1: as many as fit beside `max_tokens`; None: all.
        side: the side to cut off.
        params: parameters of the request.
        info: information of the engine, with the maximum length.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    if num_tokens is None:
        return None
    if side not in ("left", "right"):
        raise InvalidRequestError(
            f"truncation_side is {side!r:.80}; it must be left or right", param="truncation_side"
        )
    if num_tokens == -1:
        wanted = getattr(params, "max_tokens", None) or 1
        longest = info.max_model_len
        fitting = longest - wanted if wanted < longest else info.max_prompt_len
        return Truncation(fitting if info.pooling is None else longest, side)
    limit = info.max_prompt_len
    if type(num_tokens) is not int or not 1 <= num_tokens <= limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {num_tokens!r:.80}; it must be -1, or from 1 to {limit}, which "
            f"leaves room for what the request returns ({info.length_limit})",
            param="truncate_prompt_tokens",
        )
    return Truncation(num_tokens, side)

"""Reasoning options of a chat, as parameters of the engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.dialogue.reasoning.formats import ExpectedReasoning, ReasoningFormat
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningParams, StructuredOutputsParams

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningControl:
    """Reasoning options of a chat.

    Args:
        format: format of the model's reasoning.
        budget: maximum number of tokens; None: as many as it takes.
        budget_message: text inserted before reasoning is ended because the budget is spent.
        continued: the beginning of the answer that the prompt already has.
        leads_to_content: whether content must follow, in formats where that is a message of its own;
            otherwise the grammar decides which message follows.
    """

    format: ReasoningFormat
    budget: int | None = None
    budget_message: str = ""
    continued: str = ""
    leads_to_content: bool = True


def params_with_reasoning(
    params: SamplingParams, control: ReasoningControl, expected: ExpectedReasoning, tokenizer: Tokenizer
) -> SamplingParams:
    """Return `params` with a grammar that lets reasoning, perhaps with a budget, precede the structure.

    They are unchanged if there is neither budget nor structure.

    Args:
        params: sampling parameters of the answer.
        control: the reasoning options.
        expected: the reasoning that the answer may begin with.
        tokenizer: tokenizer of the model.
    """
    structure = params.structured_outputs
    if structure is None and control.budget is None:
        return params
    marks = control.format
    bridge = marks.message_start + (marks.content_header if control.leads_to_content else "")
    closing = f"{control.budget_message}{marks.space_before_end}{marks.end}{marks.space_after_end}{bridge}"
    reasoning = ReasoningParams(
        start=marks.start,
        end=marks.end,
        is_open=expected.is_open,
        start_token_ids=tuple(tokenizer.encode(marks.start, add_special_tokens=False)),
        end_token_id=tokenizer.added_token_id(marks.end),
        budget=control.budget,
        closing_token_ids=tuple(tokenizer.encode(closing, add_special_tokens=False)),
        bridge_token_ids=tuple(tokenizer.encode(bridge, add_special_tokens=False)),
    )
    if structure is None:
        with_reasoning = StructuredOutputsParams(reasoning=reasoning)
    else:
        with_reasoning = dataclasses.replace(structure, reasoning=reasoning)
    return dataclasses.replace(params, structured_outputs=with_reasoning)

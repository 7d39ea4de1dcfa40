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
        format: of the model's reasoning.
        budget: maximum number of tokens; None: as many as it takes.
        budget_message: said before the reasoning is ended because the budget is spent.
        continued: the beginning of the answer that is in the prompt already.
        leads_to_content: whether content must follow, where that is a message of its own; otherwise the
            structure tells which message it is.
    """

    format: ReasoningFormat
    budget: int | None = None
    budget_message: str = ""
    continued: str = ""
    leads_to_content: bool = True


def params_with_reasoning(
    params: SamplingParams, control: ReasoningControl, expected: ExpectedReasoning, tokenizer: Tokenizer
) -> SamplingParams:
    """Return `params` whose structure applies after the reasoning, which may have a budget.

    They are unchanged if there is neither.

    Args:
        params: of the answer.
        control: of its reasoning.
        expected: with which the answer may begin.
        tokenizer: of the model.
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

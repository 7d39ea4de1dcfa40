"""Reasoning formats: a table, and the part of the reasoning that a prompt has opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.dialogue.harmony_messages import ANALYSIS_HEADER, END, FINAL_HEADER, MARKS, MESSAGE_START


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around reasoning, with which an answer may begin.

    Args:
        start, end: the marks.
        tokens: special tokens of the model that are only a part of a mark.
        content_marks: around content, and no part of it; a model may leave them out.
        openings: other texts at the end of a prompt that has begun reasoning.
        template_marks: a chat template of this format has at least one of these texts.
        space_before_end, space_after_end: white space, or marks of content, that it writes around `end`.
        message_start: begins each message but the first, where reasoning and content are messages; "" where
            they are not.
        content_header: follows it in a message that is content.
        efforts: values of `reasoning_effort` that the models know; empty: any.
    """

    start: str
    end: str
    tokens: tuple[str, ...] = ()
    content_marks: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    template_marks: tuple[str, ...]
    space_before_end: str = "\n"
    space_after_end: str = "\n\n"
    message_start: str = ""
    content_header: str = ""
    efforts: tuple[str, ...] = ()

    @property
    def in_messages(self) -> bool:
        """Whether reasoning and content are messages, as in harmony."""
        return bool(self.message_start)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, and parts of them; any may be a special token of the model."""
        return MARKS if self.in_messages else (self.start, self.end, *self.tokens, *self.content_marks)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedReasoning:
    """Reasoning with which an answer may begin.

    Args:
        format: its marks.
        is_open: whether the prompt has begun it, so that the answer goes on without the first mark.
    """

    format: ReasoningFormat
    is_open: bool


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "apertus": ReasoningFormat(
        start="<|inner_prefix|>",
        end="<|inner_suffix|>",
        template_marks=("<|inner_suffix|>",),
        space_before_end="",
        space_after_end="",
    ),
    "cohere": ReasoningFormat(
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        content_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        template_marks=("<|END_THINKING|>",),
        space_before_end="",
        space_after_end="",
    ),
    "ernie": ReasoningFormat(
        start="<think>",
        end="</think>",
        content_marks=("<response>", "</response>"),
        template_marks=("<response>\\n",),
        space_after_end="\n\n<response>\n",
    ),
    "exaone": ReasoningFormat(start="<thought>", end="</thought>", template_marks=("</thought>",)),
    "gemma4": ReasoningFormat(
        start="<|channel>thought",
        end="<channel|>",
        tokens=("<|channel>",),
        template_marks=("<channel|>",),
        space_after_end="",
    ),
    "granite": ReasoningFormat(
        start="Here is my thought process:",
        end="Here is my response:",
        template_marks=("Here is my thought process:",),
        space_before_end="\n\n",
    ),
    "harmony": ReasoningFormat(
        start=ANALYSIS_HEADER,
        end=END,
        template_marks=(ANALYSIS_HEADER,),
        space_before_end="",
        space_after_end="",
        message_start=MESSAGE_START,
        content_header=FINAL_HEADER,
        efforts=("low", "medium", "high"),
    ),
    "hunyuan": ReasoningFormat(
        start="<think>",
        end="</think>",
        content_marks=("<answer>", "</answer>"),
        template_marks=("<answer>", "<|extra_0|>", "hy_Assistant"),
        space_after_end="\n<answer>\n",
    ),
    "kimi": ReasoningFormat(
        start="\u25c1think\u25b7", end="\u25c1/think\u25b7", template_marks=("\u25c1/think\u25b7",)
    ),
    "mistral": ReasoningFormat(
        start="[THINK]",
        end="[/THINK]",
        template_marks=("[/THINK]",),
        space_before_end="",
        space_after_end="",
    ),
    "seed": ReasoningFormat(
        start="<seed:think>",
        end="</seed:think>",
        openings=("<seed:think><seed:cot_budget_reflect>",),
        template_marks=("</seed:think>", "<seed:think>"),
    ),
    "think": ReasoningFormat(start="<think>", end="</think>", template_marks=("</think>", "<think>")),
}
"""In the order in which a chat template is searched for them."""


def reasoning_format_of_template(source: str) -> str | None:
    """Return the name of the format of a model's reasoning by its chat template; None: it has none."""
    for name, reasoning_format in REASONING_FORMATS.items():
        if any(mark in source for mark in reasoning_format.template_marks):
            return name
    return None


def expected_reasoning(
    reasoning_format: ReasoningFormat, prompt: str, continued: str = ""
) -> ExpectedReasoning | None:
    """Return the reasoning that the answer to a prompt may begin with; None: the prompt has ended it.

    Templates put empty reasoning into the prompt for a model that is not to reason.

    Args:
        reasoning_format: reasoning format of the model.
        prompt: text that the template has written.
        continued: the beginning of the answer, if that is at the end of the prompt.
    """
    if continued.strip():
        is_open = continued.rfind(reasoning_format.start) > continued.rfind(reasoning_format.end)
        return ExpectedReasoning(reasoning_format, is_open=True) if is_open else None
    said = prompt.rstrip()
    if said.endswith(
        reasoning_format.content_header if reasoning_format.in_messages else reasoning_format.end
    ):
        return None
    return ExpectedReasoning(
        reasoning_format, said.endswith((reasoning_format.start, *reasoning_format.openings))
    )

"""How models show what they think before they answer: a table of formats, and what a prompt begins of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.dialogue.harmony_messages import ANALYSIS_HEADER, END, FINAL_HEADER, MARKS, MESSAGE_START


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtFormat:
    """The marks around a thought, with which an answer may begin.

    Args:
        start, end: the marks.
        template_marks: texts of which a chat template of this format has at least one.
        space_before_end, space_after_end: white space that the model writes around `end`.
        message_start: begins each message but the first, where thoughts and content are messages; "" where
            they are not.
        content_header: follows it in a message that is content.
        efforts: values of `reasoning_effort` that the models know; empty: any.
    """

    start: str
    end: str
    template_marks: tuple[str, ...]
    space_before_end: str = "\n"
    space_after_end: str = "\n\n"
    message_start: str = ""
    content_header: str = ""
    efforts: tuple[str, ...] = ()

    @property
    def in_messages(self) -> bool:
        """Whether thoughts and content are messages, as in harmony."""
        return bool(self.message_start)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, any of which may be a special token of the model."""
        return MARKS if self.in_messages else (self.start, self.end)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedThought:
    """A thought with which an answer may begin.

    Args:
        format: its marks.
        is_open: whether the prompt has begun it, so that the answer goes on without the first mark.
    """

    format: ThoughtFormat
    is_open: bool


THOUGHT_FORMATS: Mapping[str, ThoughtFormat] = {
    "cohere": ThoughtFormat(
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        template_marks=("<|END_THINKING|>",),
        space_before_end="",
        space_after_end="",
    ),
    "exaone": ThoughtFormat(start="<thought>", end="</thought>", template_marks=("</thought>",)),
    "gemma4": ThoughtFormat(
        start="<|channel>thought",
        end="<channel|>",
        template_marks=("<channel|>",),
        space_after_end="",
    ),
    "granite": ThoughtFormat(
        start="Here is my thought process:",
        end="Here is my response:",
        template_marks=("Here is my thought process:",),
        space_before_end="\n\n",
    ),
    "harmony": ThoughtFormat(
        start=ANALYSIS_HEADER,
        end=END,
        template_marks=(ANALYSIS_HEADER,),
        space_before_end="",
        space_after_end="",
        message_start=MESSAGE_START,
        content_header=FINAL_HEADER,
        efforts=("low", "medium", "high"),
    ),
    "kimi": ThoughtFormat(
        start="\u25c1think\u25b7", end="\u25c1/think\u25b7", template_marks=("\u25c1/think\u25b7",)
    ),
    "mistral": ThoughtFormat(
        start="[THINK]",
        end="[/THINK]",
        template_marks=("[/THINK]",),
        space_before_end="",
        space_after_end="",
    ),
    "seed": ThoughtFormat(
        start="<seed:think>", end="</seed:think>", template_marks=("</seed:think>", "<seed:think>")
    ),
    "think": ThoughtFormat(start="<think>", end="</think>", template_marks=("</think>", "<think>")),
}
"""In the order in which a chat template is searched for them."""


def thought_format_of_template(source: str) -> str | None:
    """Return the name of the format of a model's thoughts by its chat template; None: it has none."""
    for name, thought_format in THOUGHT_FORMATS.items():
        if any(mark in source for mark in thought_format.template_marks):
            return name
    return None


def expected_thought(
    thought_format: ThoughtFormat, prompt: str, continued: str = ""
) -> ExpectedThought | None:
    """Return the thought that the answer to a prompt may begin with; None: the prompt has ended it.

    Templates end a thought in the prompt, an empty one, for a model that is not to think.

    Args:
        thought_format: of the model.
        prompt: text that the template has written.
        continued: the beginning of the answer, if that is at the end of the prompt.
    """
    if continued.strip():
        is_open = continued.rfind(thought_format.start) > continued.rfind(thought_format.end)
        return ExpectedThought(thought_format, is_open=True) if is_open else None
    said = prompt.rstrip()
    if said.endswith(thought_format.content_header if thought_format.in_messages else thought_format.end):
        return None
    return ExpectedThought(thought_format, said.endswith(thought_format.start))

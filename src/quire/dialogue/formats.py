"""The formats in which models call tools: a table, and how a format is known from a chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.dialogue.call_reading import CallNotation
from quire.dialogue.grammar_writing import GrammarWriter
from quire.dialogue.json_calls import JsonCalls, ListedOrNamedCalls, NamedCalls
from quire.dialogue.literal_calls import BareKeyCalls, PythonicCalls
from quire.dialogue.tagged_calls import TaggedCalls
from quire.dialogue.template_names import uses_name


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What a model writes before its first call, between two calls, and after the last one."""

    head: str
    separator: str
    tail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How a model's answer calls tools.

    Args:
        notation: of the calls between the marks.
        openings: marks, each of which begins calls.
        closings: marks that may end them.
        ignored: marks around all calls, which say nothing.
        start: first character of an answer that is calls without a mark; "" if there are none such. JSON and
            lists are answers, too, so only calls of tools that the request has count.
        layout: of the calls that a grammar enforces.
        token_layout: the layout instead of it for a model whose vocabulary has `token_layout_mark`.
        token_layout_mark: a mark of the notation.
        template_marks: what a chat template of this format has in it; each entry is texts that it has all of.
        arguments_as_text: whether the template wants a call's arguments as JSON text, not as an object.
        null_content: whether the template wants null, not "", for a message that has calls and no content.
        short_ids: whether the template wants ids of nine letters and digits.
    """

    notation: CallNotation
    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    start: str = ""
    layout: Layout
    token_layout: Layout | None = None
    token_layout_mark: str = ""
    template_marks: tuple[tuple[str, ...], ...]
    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False

    @property
    def known_only(self) -> bool:
        """Whether only calls of tools that the request has are calls."""
        return bool(self.start)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, any of which may be a special token of the model."""
        notation = self.notation.marks
        return (*self.openings, *self.closings, *self.ignored, *notation)

    def layout_for(self, writer: GrammarWriter) -> Layout:
        """Return how calls are laid out by a model with the tokens that `writer` knows."""
        if self.token_layout is not None and writer.is_token(self.token_layout_mark):
            return self.token_layout
        return self.layout

    def opening_of(self, layout: Layout) -> str:
        """Return the mark that a layout begins with."""
        marks = (*self.ignored, *self.openings)
        return next(mark for mark in marks if layout.head.startswith(mark))


_IN_TAGS = Layout("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")

_DEEPSEEK = Layout(
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>\n<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
)

FORMATS: Mapping[str, ToolCallFormat] = {
    "qwen3_coder": ToolCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=_IN_TAGS,
        notation=TaggedCalls(
            name_begin="<function=",
            name_end=">",
            key_begin="<parameter=",
            key_end=">",
            value_begin="",
            value_end="</parameter>",
            call_end="</function>",
        ),
        template_marks=(("<function=", "<parameter="),),
    ),
    "glm": ToolCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=Layout("<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>"),
        notation=TaggedCalls(
            name_begin="",
            name_end="",
            key_begin="<arg_key>",
            key_end="</arg_key>",
            value_begin="<arg_value>",
            value_end="</arg_value>",
            call_end="",
        ),
        template_marks=(("<arg_key>", "<arg_value>"),),
    ),
    "deepseek_v3": ToolCallFormat(
        openings=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        closings=("<\uff5ctool\u2581call\u2581end\uff5c>",),
        ignored=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        layout=_DEEPSEEK,
        notation=NamedCalls("<\uff5ctool\u2581sep\uff5c>", kind="function", fence=("```json", "```")),
        template_marks=(("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"),),
        arguments_as_text=True,
        null_content=True,
    ),
    "deepseek_v31": ToolCallFormat(
        openings=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        closings=("<\uff5ctool\u2581call\u2581end\uff5c>",),
        ignored=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        layout=_DEEPSEEK,
        notation=NamedCalls("<\uff5ctool\u2581sep\uff5c>"),
        template_marks=(("<\uff5ctool\u2581call\u2581begin\uff5c>",),),
        arguments_as_text=True,
        null_content=True,
    ),
    "gemma": ToolCallFormat(
        openings=("<start_function_call>",),
        closings=("<end_function_call>",),
        layout=Layout(
            "<start_function_call>", "<end_function_call><start_function_call>", "<end_function_call>"
        ),
        notation=BareKeyCalls("<escape>"),
        template_marks=(("<start_function_call>",),),
    ),
    "gemma4": ToolCallFormat(
        openings=("<|tool_call>",),
        closings=("<tool_call|>",),
        layout=Layout("<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>"),
        notation=BareKeyCalls('<|"|>'),
        template_marks=(("<|tool_call>",),),
    ),
    "olmo3": ToolCallFormat(
        openings=("<function_calls>",),
        closings=("</function_calls>",),
        layout=Layout("<function_calls>", "\n", "</function_calls>"),
        notation=PythonicCalls(in_list=False),
        template_marks=(("<function_calls>",),),
    ),
    "mistral": ToolCallFormat(
        openings=("[TOOL_CALLS]",),
        layout=Layout("[TOOL_CALLS][", ", ", "]"),
        token_layout=Layout("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
        token_layout_mark="[ARGS]",
        notation=ListedOrNamedCalls(JsonCalls(), NamedCalls("[ARGS]")),
        template_marks=(("[TOOL_CALLS]",),),
        short_ids=True,
    ),
    "hermes": ToolCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=_IN_TAGS,
        notation=JsonCalls(separators=()),
        template_marks=(("<tool_call>",),),
    ),
    "phi": ToolCallFormat(
        openings=("<|tool_call|>", "functools"),
        closings=("<|/tool_call|>",),
        layout=Layout("<|tool_call|>[", ", ", "]<|/tool_call|>"),
        notation=JsonCalls(),
        template_marks=(("<|tool|>", "<|/tool|>"), ("functools[",)),
    ),
    "granite": ToolCallFormat(
        openings=("<|tool_call|>", "<tool_call>"),
        closings=("</tool_call>",),
        layout=Layout("<|tool_call|>[", ", ", "]"),
        notation=JsonCalls(),
        template_marks=(("<|start_of_role|>", "<|tool_call|>"),),
    ),
    "pythonic": ToolCallFormat(
        openings=("<|python_start|>",),
        closings=("<|python_end|>",),
        start="[",
        layout=Layout("[", ", ", "]"),
        notation=PythonicCalls(),
        template_marks=(("<|python_start|>",), ("[func_name1(",)),
    ),
    "llama3_json": ToolCallFormat(
        openings=("<|python_tag|>",),
        start="{",
        layout=Layout("", "; ", ""),
        notation=JsonCalls(argument_key="parameters"),
        template_marks=(('{"name": function name, "parameters":',), ("<|python_tag|>",)),
    ),
}
"""In the order in which a chat template is searched for them."""


def has_place_for_tools(template: str) -> bool:
    """Whether a chat template says anything of a request's tools."""
    return uses_name(template, "tools")


def format_of_template(source: str) -> str | None:
    """Return the name of the format in which a model with this chat template calls tools; None if unknown."""
    for name, call_format in FORMATS.items():
        if any(all(mark in source for mark in marks) for marks in call_format.template_marks):
            return name
    return None

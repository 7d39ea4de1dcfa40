"""The formats in which models call tools: a table, and how a format is known from a chat template."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from typing_extensions import override

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.json_calls import JsonCalls, ListedOrNamedCalls, NamedCalls, object_grammar
from quire.dialogue.calls.literal_calls import BareKeyCalls, PythonicCalls
from quire.dialogue.calls.marked_call_format import Layout, MarkedCallFormat
from quire.dialogue.calls.tagged_calls import TaggedCalls
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.calls.tools import Tool, ToolUse
from quire.dialogue.harmony_messages import (
    ANALYSIS_HEADER,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDS_OF_BODY,
    FINAL_HEADER,
    FUNCTIONS,
    MARKS,
    MESSAGE,
    MESSAGE_START,
    RETURN,
)

_COMMENTARY = f"{CHANNEL}commentary"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyCallFormat(ToolCallFormat):
    """How an answer in harmony calls a tool: one, since its call ends the answer."""

    @property
    @override
    def marks(self) -> tuple[str, ...]:
        return MARKS

    @property
    @override
    def in_messages(self) -> bool:
        return True

    @override
    def answer_grammar(self, writer: GrammarWriter, use: ToolUse, content: str | None) -> str:
        """See `ToolCallFormat.answer_grammar`; reasoning is not in it, and comes before."""
        call = writer.one_of(_call_grammar(writer, tool) for tool in use.callable_tools)
        if use.must_call:
            return call
        if content is None:
            content = writer.text_without(ENDS_OF_BODY)
        preamble = writer.one_of(
            [
                f"{writer.literal(_COMMENTARY + MESSAGE)} {writer.text_up_to(END, ENDS_OF_BODY)} "
                f"{writer.literal(MESSAGE_START)}"
            ]
        )
        return f"{preamble}* ({call} | {writer.literal(FINAL_HEADER)} {content})"


def _call_grammar(writer: GrammarWriter, tool: Tool) -> str:
    header = f"{_COMMENTARY} to={FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}"
    return f"{writer.literal(header)} {object_grammar(writer, tool)}"


_IN_TAGS = Layout("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")

_QWEN = TaggedCalls(
    name_begin="<function=",
    name_end=">",
    key_begin="<parameter=",
    key_end=">",
    value_begin="",
    value_end="</parameter>",
    call_end="</function>",
)

_GLM = TaggedCalls(
    name_begin="",
    name_end="",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    call_end="",
)

_DEEPSEEK_V3 = Layout(
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>\n<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
)

_DEEPSEEK_V31 = dataclasses.replace(_DEEPSEEK_V3, separator=_DEEPSEEK_V3.separator.replace("\n", ""))

FORMATS: Mapping[str, ToolCallFormat] = {
    "seed_oss": MarkedCallFormat(
        openings=("<seed:tool_call>",),
        closings=("</seed:tool_call>",),
        layout=Layout("<seed:tool_call>\n", "\n</seed:tool_call>\n<seed:tool_call>\n", "\n</seed:tool_call>"),
        notation=dataclasses.replace(_QWEN, after_key=""),
        template_marks=(("<seed:tool_call>",),),
    ),
    "minimax_m2": MarkedCallFormat(
        openings=("<minimax:tool_call>",),
        closings=("</minimax:tool_call>",),
        layout=Layout("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
        notation=TaggedCalls(
            name_begin='<invoke name="',
            name_end='">',
            key_begin='<parameter name="',
            key_end='">',
            value_begin="",
            value_end="</parameter>",
            call_end="</invoke>",
            after_key="",
        ),
        template_marks=(("<minimax:tool_call>",),),
    ),
    "qwen3_coder": MarkedCallFormat(
        openings=("<tool_call>", _QWEN.name_begin),
        closings=("</tool_call>",),
        layout=_IN_TAGS,
        notation=_QWEN,
        template_marks=(("<function=", "<parameter="),),
    ),
    "glm47": MarkedCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=Layout("<tool_call>", "</tool_call><tool_call>", "</tool_call>"),
        notation=dataclasses.replace(_GLM, line_end="", after_key=""),
        template_marks=(("</arg_key><arg_value>",),),
    ),
    "glm": MarkedCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=Layout("<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>"),
        notation=_GLM,
        template_marks=(("<arg_key>", "<arg_value>"),),
    ),
    "deepseek_v3": MarkedCallFormat(
        openings=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        closings=("<\uff5ctool\u2581call\u2581end\uff5c>",),
        ignored=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        layout=_DEEPSEEK_V3,
        notation=NamedCalls("<\uff5ctool\u2581sep\uff5c>", kind="function", fence=("```json", "```")),
        template_marks=(("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json"),),
        arguments_as_text=True,
        null_content=True,
    ),
    "deepseek_v31": MarkedCallFormat(
        openings=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        closings=("<\uff5ctool\u2581call\u2581end\uff5c>",),
        ignored=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        layout=_DEEPSEEK_V31,
        notation=NamedCalls("<\uff5ctool\u2581sep\uff5c>"),
        template_marks=(("<\uff5ctool\u2581call\u2581begin\uff5c>",),),
        arguments_as_text=True,
        null_content=True,
    ),
    "kimi_k2": MarkedCallFormat(
        openings=("<|tool_call_begin|>",),
        closings=("<|tool_call_end|>",),
        ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        layout=Layout(
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            "<|tool_call_end|><|tool_call_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        notation=NamedCalls("<|tool_call_argument_begin|>", prefix="functions.", numbered=True),
        template_marks=(("<|tool_call_argument_begin|>",),),
        numbered_ids=True,
    ),
    "gemma": MarkedCallFormat(
        openings=("<start_function_call>",),
        closings=("<end_function_call>",),
        layout=Layout(
            "<start_function_call>", "<end_function_call><start_function_call>", "<end_function_call>"
        ),
        notation=BareKeyCalls("<escape>"),
        template_marks=(("<start_function_call>",),),
    ),
    "gemma4": MarkedCallFormat(
        openings=("<|tool_call>",),
        closings=("<tool_call|>",),
        layout=Layout("<|tool_call>", "<tool_call|><|tool_call>", "<tool_call|>"),
        notation=BareKeyCalls('<|"|>'),
        template_marks=(("<|tool_call>",),),
        ends=("<|tool_response>",),
    ),
    "olmo3": MarkedCallFormat(
        openings=("<function_calls>",),
        closings=("</function_calls>",),
        layout=Layout("<function_calls>", "\n", "</function_calls>"),
        notation=PythonicCalls(in_list=False),
        template_marks=(("<function_calls>",),),
    ),
    "cohere": MarkedCallFormat(
        openings=("<|START_ACTION|>",),
        closings=("<|END_ACTION|>",),
        layout=Layout("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        notation=JsonCalls(name_key="tool_name", argument_key="parameters", id_key="tool_call_id"),
        template_marks=(("<|START_ACTION|>",),),
    ),
    "apertus": MarkedCallFormat(
        openings=("<|tools_prefix|>",),
        closings=("<|tools_suffix|>",),
        layout=Layout("<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
        notation=JsonCalls(name_key=""),
        template_marks=(("<|tools_prefix|>",),),
        arguments_as_text=True,
    ),
    "nemotron": MarkedCallFormat(
        openings=("<TOOLCALL>",),
        closings=("</TOOLCALL>",),
        layout=Layout("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        notation=JsonCalls(),
        template_marks=(("<TOOLCALL>",),),
    ),
    "hunyuan": MarkedCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        ignored=("<tool_calls>", "</tool_calls>"),
        layout=Layout("<tool_calls><tool_call>", "</tool_call><tool_call>", "</tool_call></tool_calls>"),
        notation=NamedCalls("\n", fence=("```json", "```")),
        template_marks=(("<tool_calls>", "<tool_call>", "```json"),),
        arguments_as_text=True,
    ),
    "hunyuan_a13b": MarkedCallFormat(
        openings=("<tool_calls>",),
        closings=("</tool_calls>",),
        layout=Layout("<tool_calls>[", ", ", "]</tool_calls>"),
        notation=JsonCalls(),
        template_marks=(("<tool_calls>",),),
    ),
    "mistral": MarkedCallFormat(
        openings=("[TOOL_CALLS]",),
        layout=Layout("[TOOL_CALLS][", ", ", "]"),
        token_layout=Layout("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
        token_layout_mark="[ARGS]",
        notation=ListedOrNamedCalls(JsonCalls(), NamedCalls("[ARGS]", id_begin="[CALL_ID]")),
        template_marks=(("[TOOL_CALLS]",),),
        short_ids=True,
    ),
    "harmony": HarmonyCallFormat(
        template_marks=((ANALYSIS_HEADER,),), ends=(RETURN, CALL), one_call_a_turn=True
    ),
    "hermes": MarkedCallFormat(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        layout=_IN_TAGS,
        notation=JsonCalls(),
        template_marks=(("<tool_call>",),),
    ),
    "phi": MarkedCallFormat(
        openings=("<|tool_call|>", "functools"),
        closings=("<|/tool_call|>",),
        layout=Layout("<|tool_call|>[", ", ", "]<|/tool_call|>"),
        notation=JsonCalls(),
        template_marks=(("<|tool|>", "<|/tool|>"), ("functools[",)),
    ),
    "granite": MarkedCallFormat(
        openings=("<|tool_call|>", "<tool_call>"),
        closings=("</tool_call>",),
        layout=Layout("<|tool_call|>[", ", ", "]"),
        notation=JsonCalls(),
        template_marks=(("<|start_of_role|>", "<|tool_call|>"),),
    ),
    "lfm2": MarkedCallFormat(
        openings=("<|tool_call_start|>",),
        closings=("<|tool_call_end|>",),
        layout=Layout("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        notation=PythonicCalls(),
        template_marks=(
            ("<|tool_call_start|>",),
            ("<|tool_list_start|>",),
            ("List of tools: [", "<|im_start|>"),
        ),
    ),
    "pythonic": MarkedCallFormat(
        openings=("<|python_start|>",),
        closings=("<|python_end|>",),
        start="[",
        layout=Layout("[", ", ", "]"),
        notation=PythonicCalls(),
        template_marks=(("<|python_start|>",), ("[func_name1(",)),
    ),
    "llama3_json": MarkedCallFormat(
        openings=("<|python_tag|>",),
        start="{[",
        layout=Layout("", "; ", ""),
        notation=JsonCalls(argument_key="parameters"),
        template_marks=(('{"name": function name, "parameters":',), ("<|python_tag|>",)),
    ),
}
"""In the order in which a chat template is searched for them."""


def has_place_for_tools(template: str) -> bool:
    """Whether a chat template says anything of a request's tools."""
    return uses_name(template, "tools")


@functools.lru_cache(maxsize=64)
def format_of_template(source: str) -> str | None:
    """Return the name of the format in which a model with this chat template calls tools; None if unknown."""
    for name, call_format in FORMATS.items():
        if any(all(mark in source for mark in marks) for marks in call_format.template_marks):
            return name
    return None


def call_format_of_template(source: str) -> ToolCallFormat | None:
    """Return the format in which a model with this chat template calls tools; None if unknown."""
    name = format_of_template(source)
    return None if name is None else FORMATS[name]


_EXPRESSION = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)


@functools.lru_cache(maxsize=64)
def uses_name(template: str, name: str) -> bool:
    """Whether a chat template uses a variable of this name, not only the word in a text or an attribute."""
    variable = re.compile(rf"""(?<![\w."']){re.escape(name)}(?![\w"'])""")
    return any(variable.search(found[0]) for found in _EXPRESSION.finditer(template))

"""Grammars of calls: whatever they let a model write is read back as calls with valid arguments.

The writer picks tokens at random, as no model would.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from answers import ALL_BEGIN, ALL_END, BEGIN, END, SEP, said

import quire
from byte_grammars import accepts, compiled
from quire.dialogue.calls.grammar import structure_of_answer
from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.literal_calls import PythonicCalls
from quire.dialogue.calls.tools import Tool, ToolUse
from quire.dialogue.formats import FORMATS
from quire.errors import InvalidRequestError
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.structured_outputs import StructuredOutputsParams
from quire.token_bytes import byte_level_bytes

MINI = Path(quire.__file__).parent / "mini"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "s": {"type": "string", "description": "A text."}},
    "required": ["x", "s"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "title": "City"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/point"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"point": POINT},
    },
    strict=True,
)
SWITCH = Tool(
    "switch",
    parameters={
        "properties": {"on": {"type": "boolean"}, "ids": {"type": "array", "items": {"type": "integer"}}},
        "additionalProperties": False,
    },
)
PING = Tool("ping", parameters={"additionalProperties": False})
TOOLS = (WEATHER, SWITCH, PING)
NAMES = frozenset(tool.name for tool in TOOLS)
ENDS = frozenset(b'"}])<>')
TOKENIZER = read_tokenizer(MINI)
TOKEN_BYTES = {
    token: byte_level_bytes(TOKENIZER.backend.id_to_token(token)) for token in range(TOKENIZER.vocab_size)
}


class Model:
    """A tokenizer, with the marks of a format as special tokens or without, and a writer."""

    def __init__(self, name, *, has_marks):
        content = json.loads((MINI / "tokenizer.json").read_text())
        special = [token for token in content["added_tokens"] if token["special"]]
        known = {token["content"]: token for token in content["added_tokens"] if token not in special}
        if not has_marks:
            content["added_tokens"] = special
        vocab_size = len(content["model"]["vocab"])
        self.marks = {}
        for mark in dict.fromkeys(FORMATS[name].marks) if has_marks else ():
            if mark in known:
                known[mark]["special"] = True
                self.marks[mark] = known[mark]["id"]
            elif mark[0] in "<[" and mark[-1] in ">]" and len(mark) > 1:
                self.marks[mark] = vocab_size
                vocab_size += 1
                added = {"id": self.marks[mark], "content": mark, "special": True}
                content["added_tokens"].append({**content["added_tokens"][0], **added})
        self.eos = TOKENIZER.eos_token_ids[0]
        self.texts = TOKEN_BYTES | {token: mark.encode() for mark, token in self.marks.items()}
        text = json.dumps(content)
        self.backend = LLGuidanceBackend(lambda: text, vocab_size, lambda: [self.eos])

    def answer(self, structure, seed):
        """A random answer, None if it has not ended after some tokens."""
        chance = random.Random(seed)
        grammar = self.backend.compile(structure)
        row = np.zeros(-(-self.backend.vocab_size // 32), dtype=np.int32)
        written = []
        for _ in range(300):
            grammar.fill_bitmask(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(bits).tolist() if token in self.texts]
            likely = [one for one in allowed if ENDS.intersection(self.texts[one]) or one == self.eos]
            token = chance.choice(likely if likely and chance.random() < 0.8 else allowed)
            assert grammar.accept([token])
            if token == self.eos:
                return b"".join(written).decode()
            written.append(self.texts[token])
        return None


def is_valid(name, arguments):
    if name == "ping":
        return arguments == {}
    if name == "switch":
        ids = arguments.pop("ids", [])
        return (
            arguments.pop("on", True) in (True, False) and not arguments and all(type(i) is int for i in ids)
        )
    where = arguments.pop("where", {"x": 1, "s": ""})
    return (
        type(arguments.pop("city")) is str
        and arguments.pop("unit") in ("C", "F")
        and type(arguments.pop("days", 1)) is int
        and where.keys() == {"x", "s"}
        and type(where["s"]) is str
        and not arguments
    )


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_must_be_called_is_called(name, has_marks):
    model = Model(name, has_marks=has_marks)
    several = ToolUse(TOOLS, NAMES, must_call=True)
    one = ToolUse(TOOLS, frozenset({"switch"}), must_call=True, several=False)
    called = set()
    for use, num_answers in ((several, 3), (one, 1)):
        structure = structure_of_answer(FORMATS[name], use, model.marks.get)
        for seed in range(num_answers):
            answer = model.answer(structure, seed)
            if answer is None:
                continue
            found = said(name, [answer], {tool.name: tool.parameters for tool in TOOLS})
            assert found.content == ""
            assert all(is_valid(tool, json.loads(arguments)) for tool, arguments in found.calls)
            assert 1 <= len(found.calls) <= (99 if use.several else 1)
            called |= {tool for tool, _ in found.calls}
    assert called


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_an_answer_may_be_content_and_then_calls(name):
    model = Model(name, has_marks=name == "mistral")
    use = ToolUse(TOOLS, frozenset({"ping"}), several=False)
    grammar = model.backend.compile(structure_of_answer(FORMATS[name], use, model.marks.get))
    must = ToolUse(TOOLS, frozenset({"ping"}), must_call=True, several=False)
    call = model.answer(structure_of_answer(FORMATS[name], must, model.marks.get), 1)
    content = "" if FORMATS[name].start else "Well, I look. "
    assert grammar.copy().accept([*tokens_of(model, content + call), model.eos])
    assert grammar.copy().accept([*tokens_of(model, "Well, no."), model.eos])
    assert not grammar.copy().accept(tokens_of(model, content + call.replace("ping", "pong")))


OSLO = Tool(
    "get_weather",
    parameters={
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
)
# format, two calls as the models' templates write them
WRITTEN = [
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n"
     "</function>\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
     "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=ping>\n"
     "</function>\n</seed:tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
     '<invoke name="ping">\n</invoke>\n</minimax:tool_call>'),
    ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping\n</tool_call>"),
    ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
     "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>ping</tool_call>"),
    ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Oslo", "days": 3}}, {"ping": {}}]'
     "<|tools_suffix|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     '<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|><|tool_call_begin|>'
     "functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
     '{"city": "Oslo", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]'
     "<|END_ACTION|>"),
    ("nemotron", '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, '
     '{"name": "ping", "arguments": {}}]</TOOLCALL>'),
    ("hunyuan", '<tool_calls><tool_call>get_weather\n```json\n{"city": "Oslo", "days": 3}\n```</tool_call>'
     "<tool_call>ping\n```json\n{}\n```</tool_call></tool_calls>"),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
     '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'),
    ("deepseek_v3", f'{ALL_BEGIN}{BEGIN}function{SEP}get_weather\n```json\n{{"city": "Oslo", "days": 3}}\n```'
     f"{END}\n{BEGIN}function{SEP}ping\n```json\n{{}}\n```{END}{ALL_END}"),
    ("deepseek_v31", f'{ALL_BEGIN}{BEGIN}get_weather{SEP}{{"city": "Oslo", "days": 3}}{END}'
     f"{BEGIN}ping{SEP}{{}}{END}{ALL_END}"),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}, '
     '{"name": "ping", "arguments": {}}]'),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Oslo", days=3), ping()]<|tool_call_end|>'),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
     "<|tool_call>call:ping{}<tool_call|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer"), WRITTEN)
@pytest.mark.parametrize("has_marks", [False, True])
def test_calls_that_a_template_writes_are_allowed(name, answer, has_marks):
    model = Model(name, has_marks=has_marks)
    use = ToolUse((OSLO, PING), frozenset({"get_weather", "ping"}), must_call=True)
    grammar = model.backend.compile(structure_of_answer(FORMATS[name], use, model.marks.get))
    assert grammar.accept([*tokens_of(model, answer), model.eos])
    assert [called for called, _ in said(name, [answer]).calls] == ["get_weather", "ping"]


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("content", [None, {"const": "Well."}])
def test_an_answer_in_harmony_is_preambles_and_then_a_call_or_content(has_marks, content):
    model = Model("harmony", has_marks=has_marks)
    use = ToolUse(TOOLS, frozenset({"ping"}), several=False)
    structure = structure_of_answer(
        FORMATS["harmony"],
        use,
        model.marks.get,
        content=None if content is None else StructuredOutputsParams(json=content),
    )
    grammar = model.backend.compile(structure)
    must = ToolUse(TOOLS, frozenset({"ping"}), must_call=True)
    call = model.answer(structure_of_answer(FORMATS["harmony"], must, model.marks.get), 1)
    assert call == "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}"
    final = "<|channel|>final<|message|>" + ("Well." if content is None else '"Well."')
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for answer in (call, final, preamble + call, preamble + preamble + final):
        assert grammar.copy().accept([*tokens_of(model, answer), model.eos])
    for answer in (
        "Well.", f"{preamble}Well.", call.replace("ping", "pong"), call.replace("{}", "[]"), f"{call} ",
        f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{final}", f"{final}<|end|>{call}",
    ):  # fmt: skip
        assert not grammar.copy().accept([*tokens_of(model, answer), model.eos])
    assert grammar.copy().accept(tokens_of(model, "<|channel|>final<|message|>No")) == (content is None)


def tokens_of(model, text):
    """The longest tokens of a text, one after the other."""
    ids = {one: token for token, one in reversed(model.texts.items()) if token != model.eos}
    tokens = []
    rest = text.encode()
    while rest:
        longest = max((one for one in ids if one and rest.startswith(one)), key=len)
        tokens.append(ids[longest])
        rest = rest[len(longest) :]
    return tokens


def test_content_may_have_a_structure():
    model = Model("hermes", has_marks=True)
    content = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    )
    use = ToolUse(TOOLS, NAMES)
    grammar = model.backend.compile(
        structure_of_answer(FORMATS["hermes"], use, model.marks.get, content=content)
    )
    assert grammar.copy().accept(tokens_of(model, '{"a": 1}'))
    assert grammar.copy().accept(
        tokens_of(model, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    )
    assert not grammar.copy().accept(tokens_of(model, "Well"))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2", "gemma", "pythonic"])
def test_names_that_a_format_cannot_write_are_refused(name):
    use = ToolUse((Tool("f", parameters={"properties": {" a>b</arg_key>": {}}}),), frozenset({"f"}))
    with pytest.raises(InvalidRequestError, match="cannot write"):
        structure_of_answer(FORMATS[name], use, {}.get)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2", "gemma"])
@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"properties": {"zip": {"type": "string", "pattern": "[0-9]+"}}}, "'pattern'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"zip": {}}}}}, r"'\$ref'"),
        ({"properties": {"zip": {}}, "required": ["zip", "city"]}, "required 'city'"),
    ],
)
def test_what_a_format_cannot_enforce_is_refused(name, parameters, problem):
    for strict in (False, True):
        use = ToolUse((Tool("f", parameters=parameters, strict=strict),), frozenset({"f"}))
        if strict:
            with pytest.raises(InvalidRequestError, match=problem):
                structure_of_answer(FORMATS[name], use, {}.get)
        else:
            structure_of_answer(FORMATS[name], use, {}.get)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("target", "problem"), [("unit", None), ("zip", "'pattern'"), ("d0", r"'\$ref'")])
def test_references_of_strict_schemas_are_followed(name, target, problem):
    parameters = {
        "properties": {"a": {"$ref": f"#/$defs/{target}"}},
        "required": ["a"],
        "$defs": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "zip": {"type": "string", "pattern": "[0-9]+"},
            **{f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(9)},
            "d9": {"type": "string"},
        },
    }
    use = ToolUse((Tool("f", parameters=parameters, strict=True),), frozenset({"f"}), must_call=True)
    if problem is not None:
        with pytest.raises(InvalidRequestError, match=problem):
            structure_of_answer(FORMATS[name], use, {}.get)
        return
    answer = Model(name, has_marks=False).answer(structure_of_answer(FORMATS[name], use, {}.get), 1)
    [(_, arguments), *_] = said(name, [answer]).calls
    assert json.loads(arguments)["a"] in ("C", "F")


def test_references_to_the_whole_schema_mean_it_in_the_grammar_of_one_parameter():
    schema = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    tool = Tool("f", parameters={**schema, "required": ["kids"]}, strict=True)
    tool = tool.enforceable(closes_objects=True)
    writer = GrammarWriter((), lambda mark: None)
    grammar = compiled(grammar=writer.grammar(PythonicCalls().grammar(writer, tool)))
    assert accepts(grammar, 'f(kids=[{"kids": []}])')
    assert not accepts(grammar, "f(kids=[[]])")


@pytest.mark.parametrize("bound", [{"minimum": 2**63}, {"minimum": 2**63, "multipleOf": 3}])
def test_what_grows_too_large_or_cannot_be_enforced_is_refused_with_the_tools(bound):
    many = {f"p{number}": bound for number in range(500)}
    use = ToolUse((Tool("f", parameters={"properties": many}),), frozenset({"f"}), must_call=True)
    with pytest.raises(InvalidRequestError, match="the parameters of the tools cannot be enforced") as caught:
        structure_of_answer(FORMATS["hermes"], use, lambda mark: None)
    assert caught.value.param == "tools"


def test_tools_that_are_too_large_together_are_refused_before_any_work():
    tool = Tool("f", parameters={"description": "x" * 60_000})
    use = ToolUse((tool,) * 5, frozenset({"f"}), must_call=True)
    with pytest.raises(InvalidRequestError, match="262144 at most"):
        use.enforceable(closes_objects=True)

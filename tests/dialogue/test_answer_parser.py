"""What answers say: samples of each format at every split, and calls written by writers of the tests' own."""

from __future__ import annotations

import json
import typing

import pytest
from answers import ALL_BEGIN, BEGIN, BROKEN, SAMPLES, SCHEMAS, Said, said
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_lines import num_lines
from quire.config.server import ToolCallFormatName
from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.formats import FORMATS, format_of_template, has_place_for_tools

MARKED = [name for name, one in FORMATS.items() if not one.in_messages]
MARKS = sorted({mark for one in FORMATS.values() for mark in one.marks})


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("name", "answer", "content", "calls"), SAMPLES)
def test_a_sample_at_every_split(name, answer, content, calls):
    whole = said(name, [answer])
    assert whole.content == content
    assert [(called, json.loads(arguments)) for called, arguments in whole.calls] == calls
    assert said(name, answer) == whole
    for at in range(1, len(answer)):
        assert said(name, [answer[:at], answer[at:]]) == whole


@pytest.mark.parametrize(("name", "answer", "content", "calls"), BROKEN)
def test_a_broken_call_at_every_split(name, answer, content, calls):
    for at in range(len(answer)):
        assert said(name, [answer[:at], answer[at:]]) == Said(content, calls)
    assert said(name, answer) == Said(content, calls)


@pytest.mark.parametrize("name", [name for name in MARKED if not FORMATS[name].start])
def test_no_beginning_of_a_call_is_content_where_an_answer_is_cut_off(name):
    [answer, content] = next(
        [answer, content] for one, answer, content, calls in SAMPLES if one == name and calls
    )
    opening = next(mark for mark in FORMATS[name].openings if mark in answer)
    begin = answer.index(opening) + len(opening)
    for end in range(begin, len(answer)):
        assert content.startswith(said(name, [answer[:end]], is_cut_off=True).content)


@pytest.mark.parametrize("answer", ["a <tool_call> no", "a <tool_call>{] ", "a </tool_call", "a <tool"])
def test_what_cannot_be_a_call_is_content_where_an_answer_is_cut_off(answer):
    assert said("hermes", [answer], is_cut_off=True) == Said(answer, [])


def test_each_format_is_tested_and_can_be_configured():
    assert {name for name, *_ in SAMPLES} == FORMATS.keys()
    assert {"auto", *FORMATS} == set(typing.get_args(ToolCallFormatName))


@pytest.mark.parametrize("name", MARKED)
def test_no_mark_begins_with_another(name):
    marks = (*FORMATS[name].openings, *FORMATS[name].ignored)
    assert not [(one, other) for one in marks for other in marks if one != other and one.startswith(other)]


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
@settings(max_examples=20)
def test_arbitrary_text_is_told_the_same_at_any_split(name, data):
    part = st.sampled_from([*MARKS, *'{}[]()",:<>=\\', '"name"', '"arguments"', "ping", "\n", "f(a=1)"])
    answer = "".join(data.draw(st.lists(part | st.text(max_size=4), max_size=30)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    assert said(name, pieces) == said(name, [answer])


@pytest.mark.parametrize("name", FORMATS)
@given(st.text(st.characters(exclude_characters="<[{f"), max_size=60))
@settings(max_examples=20)
def test_text_without_calls_stays_as_it_is(name, text):
    assert said(name, [text]) == Said(text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from([*MARKS, *"{}[]\"'\\", "\n", "</a>"]) | st.text(max_size=5)).map("".join)
KEYS = st.sampled_from(["city", "a", "x_1"])


@given(st.data())
@settings(max_examples=60)
def test_random_calls_as_json(data):
    name = data.draw(
        st.sampled_from(["hermes", "llama3_json", "mistral", "granite", "phi", "nemotron", "hunyuan_a13b"])
    )
    arguments = st.dictionaries(st.text(), VALUES | TEXTS, max_size=4)
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(sorted(SCHEMAS)), arguments), min_size=1, max_size=3)
    )
    ascii_only = data.draw(st.booleans())
    written = [json.dumps({"name": one, "arguments": its}, ensure_ascii=ascii_only) for one, its in calls]
    answer = {
        "hermes": "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in written),
        "llama3_json": "; ".join(written),
        "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
        "granite": f"<|tool_call|>[{', '.join(written)}]",
        "phi": f"<|tool_call|>[{', '.join(written)}]<|/tool_call|>",
        "nemotron": f"<TOOLCALL>[{', '.join(written)}]</TOOLCALL>",
        "hunyuan_a13b": f"<tool_calls>[{', '.join(written)}]</tool_calls>",
    }[name]
    at = data.draw(st.integers(0, len(answer)))
    found = said(name, [answer[:at], answer[at:]])
    assert found.content == ""
    assert [(one, json.loads(its)) for one, its in found.calls] == calls


@given(st.dictionaries(KEYS, VALUES | TEXTS, max_size=3))
@settings(max_examples=50)
def test_random_calls_in_python(arguments):
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    [(_, found)] = said("pythonic", f"[ping({written})]").calls
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    ("name", "parameter", "call"),
    [
        ("qwen3_coder", "<parameter={}>\n{}\n</parameter>\n",
         "<tool_call>\n<function=ping>\n{}</function>\n</tool_call>"),
        ("seed_oss", "<parameter={}>\n{}\n</parameter>\n",
         "<seed:tool_call>\n<function=ping>\n{}</function>\n</seed:tool_call>"),
        ("minimax_m2", '<parameter name="{}">\n{}\n</parameter>\n',
         '<minimax:tool_call>\n<invoke name="ping">\n{}</invoke>\n</minimax:tool_call>'),
        ("glm47", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "<tool_call>ping{}</tool_call>"),
    ],
)  # fmt: skip
@given(st.dictionaries(KEYS, TEXTS.filter(lambda text: "</" not in text), max_size=3))
@settings(max_examples=25)
def test_random_texts_in_tags(name, parameter, call, arguments):
    schemas = {"ping": {"properties": {key: {"type": "string"} for key in arguments}}}
    written = "".join(parameter.format(key, value) for key, value in arguments.items())
    [(_, found)] = said(name, call.format(written), schemas).calls
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>", "glm"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>", "glm47"),
        ("{{ '<minimax:tool_call>' }}<invoke name=", "minimax_m2"),
        ("{% set begin = '<seed:tool_call>' %}\n<function=x>\n<parameter=a>", "seed_oss"),
        ("{{ '<|tools_prefix|>[' }}", "apertus"),
        ("<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|END_THINKING|><|START_ACTION|>[", "cohere"),
        ("<SPECIAL_11> {{- '<TOOLCALL>[' -}}", "nemotron"),
        ("<tool_calls><tool_call>{{ name }}\n```json", "hunyuan"),
        ('<tool_calls>[{"name": "func_name1", "arguments": {}}]</tool_calls>', "hunyuan_a13b"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|start_of_role|>tools<|end_of_role|> <|tool_call|>", "granite"),
        ("prefix function calls with functools[", "phi"),
        ('<|tool_call>call:name{x:<|"|>y<|"|>}<tool_call|>', "gemma4"),
        ("<function_calls></function_calls>", "olmo3"),
        ("<|start_of_role|> <|tool_call|> <tool_call>", "hermes"),
        ("<|tool|>' + message['tools'] + '<|/tool|>", "phi"),
        ('{"name": function name, "parameters": dictionary', "llama3_json"),
        ("<|python_start|>", "pythonic"),
        ("<|im_start|>system\nList of tools: <|tool_list_start|>[", "lfm2"),
        ("<|im_start|>system\nList of tools: [", "lfm2"),
        ("<|im_start|><think>{{ '<|tool_call_start|>[' }}", "lfm2"),
        ("<start_function_call>call:", "gemma"),
        (f"{ALL_BEGIN}{BEGIN}function\n```json", "deepseek_v3"),
        (f"{ALL_BEGIN}{BEGIN}", "deepseek_v31"),
        ("<|im_start|>", None),
    ],
)
def test_the_format_of_a_template(template, name):
    assert format_of_template(template) == name


@pytest.mark.parametrize(
    ("template", "has_place"),
    [
        ("{%- if tools %}", True),
        ("{{ tools | tojson }}", True),
        ("tools", False),
        ("{% if my_tools %}", False),
        ("{% if 'tools' in message %}{{ message['tools'] }}{{ message.tools }}{% endif %}", False),
    ],
)
def test_whether_a_template_has_a_place_for_tools(template, has_place):
    assert has_place_for_tools(template) == has_place


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("hermes", "", "word <b> "),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", "\n "),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x\\n <"),
        ("hermes", '<tool_call>{"arguments": {"a": "', "x\\n <"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
        ("hermes", '<tool_call>{"name": "f", "arguments": {?', "</tool "),
        ("pythonic", "[ping(a=[", "1, 'b', "),
        ("qwen3_coder", "<tool_call><function=ping><parameter=a>", "</par\n"),
        ("qwen3_coder", "", "<function="),
        ("qwen3_coder", "", "<function=ping> "),
        ("qwen3_coder", "<tool_call><function=ping><parameter=", "a</par\n"),
        ("gemma", "<start_function_call>call:ping{a:<escape>", "<esc "),
        ("glm47", "<tool_call>ping<arg_key>a</arg_key><arg_value>", "</arg_value </arg_key>"),
        ("glm47", "<tool_call>", "ping<arg_key>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="ping"><parameter name="', "</parameter"),
        ("minimax_m2", "", "<minimax:tool_call>"),
        ("seed_oss", "<seed:tool_call><function=ping><parameter=a>", "</parameter <function=ping>"),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "', "0\\n"),
        ("hunyuan", "", "<tool_call>ping\n```json\n"),
        ("lfm2", "<|tool_call_start|>[ping(a='", "x</|tool_call_end"),
        ("lfm2", "", "<|tool_call_start|>[{"),
    ],
)
@pytest.mark.parametrize("size", [1, 7])
def test_the_cost_is_linear_in_the_text(name, begin, repeated, size):
    def cost(times):
        parser = AnswerParser(FORMATS[name], SCHEMAS)
        text = begin + times * repeated

        def read():
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()

        return num_lines(read)

    assert cost(400) < 4.5 * cost(100)

"""Values of calls are what Python's `ast` and `json` read, whole and in pieces; what these refuse is no call.

Calls are written as models' own templates write them, and changed at random.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings

import pytest
from answers import ALL_BEGIN, ALL_END, BEGIN, BROKEN, END, SAMPLES, SCHEMAS, SEP, Said, said
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from counted_lines import num_lines
from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.calls.json_copying import MAX_DEPTH, MAX_NUMBER_LENGTH
from quire.dialogue.calls.literals import json_of
from quire.dialogue.formats import FORMATS
from quire.models.text.chat_template import ChatTemplate


def in_pieces(name, answer, data, schemas=SCHEMAS):
    """What an answer says, whole, in pieces and character by character."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    whole = said(name, [answer], schemas)
    assert said(name, pieces, schemas) == said(name, answer, schemas) == whole
    return whole


def in_json(value):
    """A value of Python's as JSON has it."""
    if isinstance(value, list | tuple):
        return [in_json(one) for one in value]
    if isinstance(value, dict):
        return json.loads(json.dumps({in_json(key): in_json(one) for key, one in value.items()}))
    assume(value not in (math.inf, -math.inf))  # which are numbers only where JSON writes them so, as 1e999
    if isinstance(value, set | bytes | complex) or value is ...:
        raise TypeError
    return value


def python_arguments(source):
    """What Python makes of the arguments of a call; None: it refuses them, or JSON has no such values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that there are none of
        try:
            call = ast.parse(source, mode="eval").body
            assert isinstance(call, ast.Call)
            assert not call.args
            return {one.arg: in_json(ast.literal_eval(one.value)) for one in call.keywords}
        except (ValueError, SyntaxError, TypeError, AssertionError, MemoryError):
            return None


NUMBERS = (
    st.builds(str.format, st.sampled_from(["{}", "{:_}", "{:#x}", "{:#o}", "{:#b}"]), st.integers(0))
    | st.builds(str.format, st.sampled_from(["{!r}", "{:e}", "{:.3f}", "{:_.2f}"]), st.floats(0, 1e300))
    | st.sampled_from([".5", "5.", "1_0.0_1e1_0", "0_0", "00", "01.5", "1e999", "1j", "0xF_f", "007", "1__0"])
)  # fmt: skip
SIGNED = st.builds("".join, st.tuples(st.sampled_from(["", "", "-", "+", "- "]), NUMBERS))
STRING_PARTS = st.text(max_size=2) | st.sampled_from(
    ["\\n", "\\x41", "\\u00e9", "\\U0001F642", "\\N{BULLET}", "\\101", "\\0", "\\\n", "\\\\", "\\'", '\\"',
     "'", '"', "\n", "\r\n", "\\d", "\\/", "\\a", "\\ud83d\\ude00", "\\ud83d", ")]", "</a>", "#"]
)  # fmt: skip
STRINGS = st.builds(
    lambda prefix, quote, parts: f"{prefix}{quote}{''.join(parts)}{quote}",
    st.sampled_from(["", "", "", "r", "R", "u", "U"]),
    st.sampled_from(["'", '"', "'''", '"""']),
    st.lists(STRING_PARTS, max_size=5),
)
BLANKS = st.sampled_from(["", "", " ", "\n", " # [(\n", "\\\n"])
SCALARS = st.sampled_from(["None", "True", "False"]) | SIGNED | STRINGS
LITERALS = st.recursive(
    SCALARS | st.builds("{}{}{}".format, STRINGS, BLANKS, STRINGS),
    lambda inner: (
        st.builds(
            lambda brackets, items, end: f"{brackets[0]}{','.join(items)}{end}{brackets[1]}",
            st.sampled_from(["[]", "()", "()"]),
            st.lists(st.builds("{}{}".format, BLANKS, inner), max_size=3),
            st.sampled_from(["", ",", "\n"]),
        )
        | st.builds(
            lambda items: f"{{{','.join(f'{key}:{value}' for key, value in items)}}}",
            st.lists(st.tuples(SCALARS, inner), max_size=1) | st.lists(st.tuples(STRINGS, inner), max_size=2),
        )
    ),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=80)
def test_what_python_writes_is_what_python_reads(data):
    source = f"ping(a={data.draw(LITERALS)},{data.draw(BLANKS)}b={data.draw(LITERALS)})"
    expected = python_arguments(source)
    found = in_pieces("pythonic", f"[{source}]", data)
    if expected is not None:
        assert found.content == ""
        [(_, arguments)] = found.calls
        assert json.dumps(json.loads(arguments)) == json.dumps(expected)
    elif not re.search(r"[\n\r\0]", source):  # which are taken for part of any string
        assert found == Said(f"[{source}]", [])


PYTHON_TOKENS = st.sampled_from(
    [*"0123._eEjxX+-* [](){},:='\"\\rubfRUBFN", "'''", '"""', "None", "inf", "nan", "1e5", "'a'", "b'x'"]
)  # fmt: skip


@given(st.lists(PYTHON_TOKENS, max_size=7).map("".join), st.data())
@settings(max_examples=80)
def test_what_python_refuses_is_no_call(value, data):
    assume(")" not in value)
    source = f"ping(a={value})"
    expected = python_arguments(source)
    found = in_pieces("pythonic", f"[{source}]", data)
    assert [json.loads(arguments) for _, arguments in found.calls] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    "arguments",
    [
        "5",
        "a=1, 5",
        "**{'a': 1}",
        "*[1]",
        "a=1, a=2",
        "a",
        "a=b",
        "a=g()",
        "a=1 if b else 2",
        "a=1+2",
        "a={1, 2}",
    ],
)
def test_what_is_no_literal_is_no_call(arguments):
    answer = f"[ping({arguments})]"
    assert said("pythonic", [answer]) == said("pythonic", answer) == Said(answer, [])


def refuse(constant):
    raise ValueError(constant)


JSON_TOKENS = st.sampled_from(
    [*'0123.eE+-[],: "\\u\n', "true", "null", "NaN", "-Infinity", "None", "'a'", '"a"', '{"b": 1}', "\\ud83d",
     "\\n", "01", "1e5", "1e999", "\u00a0", "{'b': 1}", '{"b": 1,}', "{b: 1}"]
)  # fmt: skip


@given(st.lists(JSON_TOKENS, max_size=6).map("".join), st.data())
@settings(max_examples=80)
def test_what_json_refuses_is_no_call(value, data):
    call = f'{{"name": "ping", "arguments": {{"a": {value}}}}}'
    try:
        expected = [json.loads(call, strict=False, parse_constant=refuse)["arguments"]]
    except ValueError:
        expected = []
    found = in_pieces("hermes", f"<tool_call>{call}</tool_call>", data)
    assert [json.loads(arguments) for _, arguments in found.calls] == expected
    assert found.content == ("" if expected else f"<tool_call>{call}</tool_call>")


FORMAT_ARGUMENT = """{%- macro shown(value) -%}
{%- if value is string -%}{{ quote + value + quote }}
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}{
{%- for key, one in value.items() -%}{{ key }}:{{ shown(one) }}{{ '' if loop.last else ',' }}{%- endfor -%}}
{%- elif value is sequence -%}[
{%- for one in value -%}{{ shown(one) }}{{ '' if loop.last else ',' }}{%- endfor -%}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}"""
GEMMA = FORMAT_ARGUMENT + (
    "{% for call in calls %}{{ begin }}call:{{ call.name }}{{ shown(call.arguments) }}{{ end }}{% endfor %}"
)

# format, template that writes calls, as those of the format's models do
JSON_WRITERS = [
    ("hermes", "{% for call in calls %}<tool_call>\n{{ call | tojson }}\n</tool_call>\n{% endfor %}"),
    ("hermes", "<tool_call>{{ calls | tojson(indent=2, ensure_ascii=True) }}</tool_call>"),
    ("hermes", "<tool_call>\n{% for call in calls %}{{ call | tojson }}\n{% endfor %}</tool_call>"),
    ("hermes", "{% for call in calls %}<tool_call>\n"
     '{"id": "call_1", "type": "function", "arguments": {{ call.arguments | tojson | tojson }}, '
     '"name": "{{ call.name }}"}\n</tool_call>\n{% endfor %}'),
    ("llama3_json", "{% for call in calls %}{{ '' if loop.first else '; ' }}"
     '{"type": "function", "name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
     "{% endfor %}"),
    ("llama3_json", '<|python_tag|>{% for call in calls %}{"name": "{{ call.name }}", '
     '"parameters": {{ call.arguments | tojson(indent=1) }}}\n{% endfor %}'),
    ("llama3_json", "{{ calls | tojson }}"),
    ("llama3_json", '[{% for call in calls %}{"id": "call_1", "function": {{ call | tojson }}, '
     '"type": "function"}'
     "{{ '' if loop.last else ',\n' }}{% endfor %}]"),
    ("granite", '<|tool_call|>[{% for call in calls %}{"arguments": {{ call.arguments | tojson }}, '
     '"name": "{{ call.name }}"}{{ "" if loop.last else ", " }}{% endfor %}]'),
    ("phi", "<|tool_call|>{{ calls | tojson }}<|/tool_call|>"),
    ("apertus", "<|tools_prefix|>[{% for call in calls %}"
     '{"{{ call.name }}": {{ call.arguments | tojson }}}{{ "" if loop.last else ", " }}'
     "{% endfor %}]<|tools_suffix|>"),
    ("kimi_k2", "<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>functions."
     "{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ call.arguments | tojson }}"
     "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"),
    ("cohere", "<|START_ACTION|>[\n{% for call in calls %}    "
     '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.name }}", '
     '"parameters": {{ call.arguments | tojson }}}{{ "" if loop.last else "," }}\n{% endfor %}]'
     "<|END_ACTION|>"),
    ("hunyuan", "<tool_calls>{% for call in calls %}<tool_call>{{ call.name }}\n```json\n"
     "{{ call.arguments | tojson }}\n```</tool_call>{% endfor %}</tool_calls>"),
    ("phi", "functools{{ calls | tojson }}"),
    ("lfm2", "<|tool_call_start|>{{ calls | tojson }}<|tool_call_end|>"),
    ("mistral", "[TOOL_CALLS] [{% for call in calls %}{{ (call | tojson)[:-1] }}, "
     '"id": "abcdefghi"}{{ "" if loop.last else ", " }}{% endfor %}]'),
    ("mistral", "{% for call in calls %}[TOOL_CALLS]{{ call.name }}[CALL_ID]abcdefghi[ARGS]"
     "{{ call.arguments | tojson }}{% endfor %}"),
    ("mistral", "{% for call in calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"
     "{% endfor %}"),
    ("deepseek_v3", f"{ALL_BEGIN}{{% for call in calls %}}{BEGIN}function{SEP}{{{{ call.name }}}}\n```json\n"
     f"{{{{ call.arguments | tojson }}}}\n```{END}\n{{% endfor %}}{ALL_END}"),
    ("deepseek_v31", f"{ALL_BEGIN}{{% for call in calls %}}{BEGIN}{{{{ call.name }}}}{SEP}"
     f"{{{{ call.arguments | tojson }}}}{END}{{% endfor %}}{ALL_END}"),
    ("harmony", "{% for call in calls %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary "
     "json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}"),
]  # fmt: skip
KEYED_WRITERS = [
    ("pythonic", "[{% for call in calls %}{{ call.name }}({% for key, value in call.arguments.items() %}"
     "{{ key }}={{ '%r' | format(value) }}{{ '' if loop.last else ', ' }}{% endfor %})"
     "{{ '' if loop.last else ', ' }}{% endfor %}]"),
    ("lfm2", "<|tool_call_start|>[{% for call in calls %}{{ call.name }}("
     "{% for key, value in call.arguments.items() %}{{ key }}={{ '%r' | format(value) }}"
     "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]"
     "<|tool_call_end|>"),
    ("olmo3", "<function_calls>{% for call in calls %}{{ call.name }}("
     "{% for key, value in call.arguments.items() %}{{ key }}={{ value | tojson }}"
     "{{ '' if loop.last else ', ' }}{% endfor %})\n{% endfor %}</function_calls>"),
    ("gemma", "{% set begin, end = '<start_function_call>', '<end_function_call>' %}"
     "{% set quote = '<escape>' %}" + GEMMA),
    ("gemma4", "{% set begin, end, quote = '<|tool_call>', '<tool_call|>', '<|\"|>' %}" + GEMMA),
]  # fmt: skip
TAGGED_WRITERS = [
    ("qwen3_coder", "{% for call in calls %}<tool_call>\n<function={{ call.name }}>\n"
     "{% for key, value in call.arguments.items() %}<parameter={{ key }}>\n"
     "{% set is_list = value is sequence and value is not string %}"
     "{{ value | tojson if value is mapping or is_list else value | string }}\n"
     "</parameter>\n{% endfor %}</function>\n</tool_call>{{ '' if loop.last else '\n' }}{% endfor %}"),
    ("glm47", "{% for call in calls %}<tool_call>{{ call.name }}"
     "{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>"
     "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>"
     "{% endfor %}"),
    ("glm", "{% for call in calls %}\n<tool_call>{{ call.name }}"
     "{% for key, value in call.arguments.items() %}\n<arg_key>{{ key }}</arg_key>\n"
     "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}\n</tool_call>"
     "{% endfor %}"),
]  # fmt: skip
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",))) | st.lists(
    st.sampled_from(["\n", '\\"', "'", "</tool_call>", "[TOOL_CALLS]", "\\ud83d", "\r\n", "\u2028", "🙂"])
).map("".join)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["get_weather", "ping"])


def written_by(template, calls):
    shown = [{"name": name, "arguments": arguments} for name, arguments in calls]
    chat = ChatTemplate(template, {}).render(
        [], add_generation_prompt=False, tools=None, variables={"calls": shown}, traces=False
    )
    return chat.text


def assert_read_back(name, template, calls, data, schemas=SCHEMAS):
    found = in_pieces(name, written_by(template, calls), data, schemas)
    assert found.content == ""
    assert found.has_calls
    read = [(called, json.loads(arguments)) for called, arguments in found.calls]
    assert json.dumps(read) == json.dumps(calls)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("name", "template"), JSON_WRITERS)
@given(
    st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3), st.data()
)
@settings(max_examples=8)
def test_what_a_template_writes_in_json_is_read(name, template, calls, data):
    assert_read_back(name, template, calls, data)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("name", "template"), KEYED_WRITERS)
@given(st.data())
@settings(max_examples=15)
def test_what_a_template_writes_with_keys_is_read(name, template, data):
    keys = st.from_regex(r"[a-z]\w{0,3}", fullmatch=True)
    values = VALUES
    if name.startswith("gemma"):  # in which marks end a text, whatever is in it, and keys are bare
        inner = st.none() | st.booleans() | st.integers() | FLOATS | TEXTS
        bare = st.from_regex(r"[a-z][a-z \"'.-]{0,3}[a-z]", fullmatch=True)
        values = st.recursive(
            inner,
            lambda one: st.lists(one, max_size=3) | st.dictionaries(bare, one, max_size=2),
            max_leaves=6,
        )
        keys |= bare
    calls = data.draw(
        st.lists(st.tuples(NAMES, st.dictionaries(keys, values, max_size=3)), min_size=1, max_size=3)
    )
    assert_read_back(name, template, calls, data)


OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=2)
LISTS = st.lists(VALUES, max_size=2)
WHOLE_TEXTS = TEXTS.filter(lambda text: "</" not in text)
UNIT = {"$ref": "#/$defs/unit"}
# JSON schema of a parameter, values of it that a template writes
TYPED = [
    ({"type": "string"}, WHOLE_TEXTS | st.sampled_from(["12", "null", "true", '"a"', "{}"])),
    ({}, WHOLE_TEXTS),
    (UNIT, st.sampled_from(["C", "12"])),
    ({"type": "integer"}, st.integers()),
    ({"$ref": "#/$defs/count"}, st.integers()),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, st.none() | st.integers()),
    ({"anyOf": [UNIT, {"type": "null"}]}, st.none() | st.sampled_from(["C", "12"])),
    ({"allOf": [{"$ref": "#/$defs/count"}, {"description": "how many"}]}, st.integers()),
    ({"type": ["string", "null"]}, st.none() | st.sampled_from(["C", '"C"', "12", "+5"])),
    ({"type": "integer", "nullable": True}, st.none() | st.integers()),
    ({"type": "number"}, st.integers() | FLOATS),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["string", "boolean"]}, st.booleans() | st.sampled_from(["yes", "1", "+5"])),
    ({"type": "object"}, OBJECTS),
    ({"properties": {}}, OBJECTS),
    ({"type": "array"}, LISTS),
    ({"items": {}}, LISTS),
    ({"enum": [1, 2.5, None, True, "a"]}, st.sampled_from([1, 2.5, None, True, "a"])),
    ({"$ref": "#/$defs/loop"}, st.none() | st.integers()),
    ({"$ref": "#/$defs/missing"}, OBJECTS),
]  # fmt: skip
DEFINITIONS = {
    "unit": {"type": "string", "enum": ["C", "12"]},
    "count": {"type": "integer"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}, {"$ref": "#/$defs/count"}]},
}


def schema_of(properties):
    return {"ping": {"type": "object", "properties": properties, "$defs": DEFINITIONS}}


@pytest.mark.parametrize(("name", "template"), TAGGED_WRITERS)
@given(st.data())
@settings(max_examples=40)
def test_what_a_template_writes_in_tags_is_read(name, template, data):
    chosen = data.draw(st.lists(st.sampled_from(TYPED), max_size=3))
    arguments = {f"p{index}": data.draw(values) for index, (_, values) in enumerate(chosen)}
    assume("</" not in json.dumps(arguments))
    schemas = schema_of({f"p{index}": schema for index, (schema, _) in enumerate(chosen)})
    assert_read_back(name, template, [("ping", arguments)], data, schemas)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "1_000", 1000),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "1e999", "1e999"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "None", "None"),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "object"}, "{'a': (1, None)}", {"a": [1, None]}),
        ({"type": "object"}, "{'a': {1}}", "{'a': {1}}"),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"type": "array"}, "[" * 300, "[" * 300),
        ({"type": "array"}, "[" * 300 + "]" * 300, "[" * 300 + "]" * 300),
        ({"type": ["string", "object"]}, "{'a': 1}", "{'a': 1}"),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_in_tags_that_no_template_writes(schema, written, value):
    answer = f"<tool_call><function=ping><parameter=a>\n{written}\n</parameter></function></tool_call>"
    [(_, arguments)] = said("qwen3_coder", [answer], schema_of({"a": schema})).calls
    assert json.loads(arguments) == {"a": value}


CALLS = [(name, answer) for name, answer, *_ in (*SAMPLES, *BROKEN)]
CHANGES = st.sampled_from(
    [*"{}[]()<>\"'\\,:=;_-+.0eE#n \n", "NaN", "None", "'''", "\\u", "\\ud83d", "]}", "}}", "[[[[", "r'"]
) | st.sampled_from(sorted({mark for one in FORMATS.values() for mark in one.marks}))  # fmt: skip


@given(st.sampled_from(CALLS), st.data())
@settings(max_examples=80)
def test_a_changed_call_is_a_call_or_content(call, data):
    name, answer = call
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(answer)))
        num_lost = data.draw(st.sampled_from([0, 0, 1, 1, 3, 10]))
        answer = answer[:at] + data.draw(st.just("") | CHANGES) + answer[at + num_lost :]
    in_pieces(name, answer, data)  # which tells that arguments are objects


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("pythonic", "[ping(a=", "["),
        ("pythonic", "[ping(a=", "("),
        ("pythonic", "[ping(a=", "-"),
        ("pythonic", "[ping(a=", "1"),
        ("pythonic", "[ping(a=", "0x1_"),
        ("pythonic", "[ping(a=", "'a' "),
        ("pythonic", "[ping(a=", "# c\n"),
        ("pythonic", "[ping(a='''", "''\\N{BULLET}\r"),
        ("pythonic", "[ping(a=((", "1, "),
        ("pythonic", "[", "ping(a=1), "),
        ("olmo3", "<function_calls>", "ping(a=1, b=<\n"),
        ("llama3_json", "", '{"name": "ping"}\n'),
        ("llama3_json", '{"name": "ping", "parameters": "', '{\\"a\\": \\"'),
        ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": <'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', '{"a":'),
        ("gemma", "<start_function_call>call:ping{", "a"),
        ("gemma", "<start_function_call>call:ping{", "{a:"),
        ("qwen3_coder", "<tool_call>", "<function=ping><parameter=a>1</parameter></function>"),
    ],
)
def test_the_cost_of_values_is_linear(name, begin, repeated):
    def cost(times):
        parser = AnswerParser(FORMATS[name], SCHEMAS)
        text = begin + times * repeated

        def read():
            for character in text:
                parser.feed(character)
            parser.finish()

        return num_lines(read)

    assert cost(160) < 4.5 * cost(40)


@pytest.mark.parametrize("bracket", ["[", "{", "(", '{"a":', "-", "'", "9", "[0,"])
@pytest.mark.parametrize(
    ("name", "begin"), [("pythonic", "[ping(a="), ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ')]
)
def test_a_long_run_is_content(name, begin, bracket):
    answer = begin + bracket * 200_000
    assert said(name, [answer]) == Said(answer, [])


@pytest.mark.parametrize(("depth", "is_call"), [(MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False)])
@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_brackets_and_digits_are_bounded(name, depth, is_call):
    digits = "1" * (MAX_NUMBER_LENGTH + (0 if is_call else 1))
    for value in ("[" * depth + "]" * depth, digits):
        answer = f"[ping(a={value})]"
        if name == "hermes":
            answer = f'<tool_call>{{"name": "ping", "arguments": {{"a": {value}}}}}</tool_call>'
        assert said(name, [answer]).has_calls == is_call


def test_json_and_python_differ_in_escapes():
    assert json_of(r'"\/"', allows_python=True) == r'"\/"'
    assert json_of(r'["\/", "\d"]', allows_python=True) == r'["\\/", "\\d"]'

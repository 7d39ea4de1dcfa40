"""Answers of models in each format of tool calls, and what they say."""

from __future__ import annotations

import dataclasses
import json

from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta
from quire.dialogue.formats import FORMATS

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": ["string", "null"]},
            "precise": {"type": "boolean"},
            "where": {"type": "object"},
            "level": {"enum": [1, 2, "high"]},
            "part": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
    "ping": {},
}


@dataclasses.dataclass
class Said:
    content: str
    calls: list[tuple[str, str]]  # that are complete
    has_calls: bool = False  # and that is what the answer has


def said(name, pieces, schemas=SCHEMAS, *, is_cut_off=False):
    """What a format's parser makes of an answer in these pieces, having checked the order of events."""
    parser = AnswerParser(FORMATS[name], schemas)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(is_cut_off=is_cut_off)
    content, calls, num_told, written = "", [], 0, None
    for event in events:
        match event:
            case ContentDelta(text=text):
                assert text
                assert written is None
                content += text
            case CallBegin(index=index, name=called):
                assert index == num_told
                assert written is None
                num_told += 1
                written = ""
            case ArgumentsDelta(index=index, text=text):
                assert text
                assert index == num_told - 1
                written += text
            case CallEnd(index=index, is_complete=is_complete):
                assert index == num_told - 1
                if is_complete:
                    assert isinstance(json.loads(written), dict)
                    calls.append((called, written))
                written = None
    assert written is None
    assert parser.has_calls <= bool(calls)
    return Said(content, calls, parser.has_calls)


def object_call(name, arguments, key="arguments"):
    return f'{{"name": {json.dumps(name)}, "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


TRICKY = 'a "b" {c}]} \\ </tool_call> <tool_call> é漢🙂\n[TOOL_CALLS]'
WEATHER = ("get_weather", {"city": TRICKY, "days": 2})
PING = ("ping", {})
SEP, BEGIN, END, ALL_BEGIN, ALL_END = (
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("sep", "call\u2581begin", "call\u2581end", "calls\u2581begin", "calls\u2581end")
)

# format, answer, content, calls
SAMPLES = [
    ("hermes", f"Let me see.\n<tool_call>\n{object_call(*WEATHER)}\n</tool_call>\n"
     f"<tool_call>\n{object_call(*PING)}\n</tool_call>", "Let me see.", [WEATHER, PING]),
    ("hermes", '<tool_call>{"arguments": {"city": "P"}, "name": "ping"}</tool_call>', "",
     [("ping", {"city": "P"})]),
    ("hermes", '<tool_call>[{"name": "ping"}, {"name": "ping", "x": [1]}]</tool_call>', "", [PING, PING]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}}</tool_call>', "",
     [("ping", {"a": "é"})]),
    ("hermes", 'Hi\n<tool_call>{"name": "ping"}</tool_call>\n there ', "Hi\nthere ", [PING]),
    ("hermes", '1 < 2, <tool, <tool_cal> and {"name": "ping"} \n',
     '1 < 2, <tool, <tool_cal> and {"name": "ping"} \n', []),
    ("hermes", " a <tool_call> no </tool_call> b", " a <tool_call> no </tool_call> b", []),
    ("hermes", 'a <tool_call> <tool_call>{"name": "ping"}</tool_call>', "a <tool_call>", [PING]),
    ("hermes", '<tool_call>{"nom": "ping"}</tool_call>', '<tool_call>{"nom": "ping"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "pi', '<tool_call>{"name": "pi', []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "ping", "parameters": {"b": 2}}</tool_call>', "",
     [("ping", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "",
     [("f", {"a": "x\ny"})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>\n{"name": "ping"}\n{"name": "f", "parameters": null}\n</tool_call>', "",
     [PING, ("f", {})]),
    ("llama3_json", object_call("ping", {"x": [1.5e3, True, None]}, "parameters"), "",
     [("ping", {"x": [1500.0, True, None]})]),
    ("llama3_json", f'<|python_tag|>{object_call(*WEATHER)}; {object_call(*PING, "parameters")}', "",
     [WEATHER, PING]),
    ("llama3_json", '{"name": "Anna", "parameters": 3}', '{"name": "Anna", "parameters": 3}', []),
    ("llama3_json", '\n{"a": 1}\n', '\n{"a": 1}\n', []),
    ("llama3_json", 'As {"name": "ping", "parameters": {}}', 'As {"name": "ping", "parameters": {}}', []),
    ("llama3_json", '{"name": "ping", "parameters": {}}{"name": "ping"}\n\n{"type": "function", "name": '
     '"ping", "parameters": {"a": 1}} ; {"name": "ping"}, {"name": "ping"}', "",
     [PING, PING, ("ping", {"a": 1}), PING, PING]),
    ("llama3_json", f"<|python_tag|>{object_call(*PING)}\n<|python_tag|>{object_call(*PING)}", "",
     [PING, PING]),
    ("llama3_json", f'[{object_call(*PING, "parameters")}, {object_call(*PING)}]', "", [PING, PING]),
    ("llama3_json", '[1, {"name": "ping"}]', '[1, {"name": "ping"}]', []),
    ("llama3_json", '{"name": "ping"}; {"a": 1}', '; {"a": 1}', [PING]),
    ("llama3_json", '{"name": "ping"}; {"name": "Anna"}', '; {"name": "Anna"}', [PING]),
    ("pythonic", "[get_weather(city='it\\'s \\x41\\u00e9\\n', days=3, where={'a': (1, -2.5), \"b\": "
     "[None, True]}), ping()]", "",
     [("get_weather", {"city": "it's Aé\n", "days": 3, "where": {"a": [1, -2.5], "b": [None, True]}}), PING]),
    ("pythonic", '<|python_start|>[ping(a = false, b=[], c={},)]<|python_end|>', "",
     [("ping", {"a": False, "b": [], "c": {}})]),
    ("pythonic", "[ping(), # two\n ping(a=('x' # y\n r'\\d'), b=(1), c=(), d={1: -.5, None: 0x_1f}),]",
     "",
     [PING, ("ping", {"a": "x\\d", "b": 1, "c": [], "d": {"1": -0.5, "null": 31}})]),
    ("pythonic", f"[{object_call(*PING)}]", "", [PING]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", '[{"name": 1}]', '[{"name": 1}]', []),
    ("lfm2", "<|tool_call_start|>[get_weather(city='it\\'s P', days=3, unit=None, where={'a': [True]}), "
     "ping()]<|tool_call_end|>I look.", "I look.",
     [("get_weather", {"city": "it's P", "days": 3, "unit": None, "where": {"a": [True]}}), PING]),
    ("lfm2", 'Yes.<|tool_call_start|> [get_weather(city="New\nYork ]")]<|tool_call_end|>', "Yes.",
     [("get_weather", {"city": "New\nYork ]"})]),
    ("lfm2", f"<|tool_call_start|>[{object_call(*WEATHER)}, {object_call(*PING)}]<|tool_call_end|>", "",
     [WEATHER, PING]),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("mistral", f"Yes.[TOOL_CALLS][{object_call(*WEATHER)}, {object_call(*PING)}]", "Yes.", [WEATHER, PING]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(WEATHER[1])}[TOOL_CALLS]ping{{}}", "",
     [WEATHER, PING]),
    ("mistral", '[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]ping[ARGS]null'
     "[TOOL_CALLS]ping[ARGS]", "", [("ping", {"a": 1}), PING, PING]),
    ("mistral", '[TOOL_CALLS] [{"name": "ping", "arguments": "{\\"a\\": 1}", "id": "abcdefghi"}]', "",
     [("ping", {"a": 1})]),
    ("gemma", "<start_function_call>call:ping{<escape>a b<escape>:None,c d:-1,'e':[],f:{g:celsius}}"
     "call:ping{}<end_function_call>", "",
     [("ping", {"a b": None, "c d": -1, "e": [], "f": {"g": "celsius"}}), PING]),
    ("gemma", '<start_function_call>call:get_weather{city:<escape>"P" {x}<escape>,days:3,'
     'where:{a:[1,<escape>b<escape>]}}<end_function_call><start_function_call>call:ping{}<end_function_call>',
     "", [("get_weather", {"city": '"P" {x}', "days": 3, "where": {"a": [1, "b"]}}), PING]),
    ("gemma4", 'Yes.<|tool_call>call:get_weather{city:<|"|>a "b" {c}<|"|>,where:'
     '{<|"|>x y<|"|>:[-1.5,<|"|><|"|>],z:true}}<tool_call|>', "Yes.",
     [("get_weather", {"city": 'a "b" {c}', "where": {"x y": [-1.5, ""], "z": True}})]),
    ("olmo3", "<function_calls>get_weather(city='New\\nYork', days=3)\nping()\n</function_calls>", "",
     [("get_weather", {"city": "New\nYork", "days": 3}), PING]),
    ("olmo3", "<function_calls>ping(); ping(a=1)</function_calls>", "", [PING, ("ping", {"a": 1})]),
    ("olmo3", "<function_calls>\nping()\n</function_calls>.", ".", [PING]),
    ("granite", f"<|tool_call|>[{object_call(*WEATHER)}]", "", [WEATHER]),
    ("granite", f"<tool_call>[{object_call(*WEATHER)}]</tool_call>", "", [WEATHER]),
    ("phi", f"<|tool_call|>[{object_call(*WEATHER)}, {object_call(*PING)}]<|/tool_call|>", "",
     [WEATHER, PING]),
    ("apertus", f'I look.<|tools_prefix|>[{{"get_weather": {json.dumps(WEATHER[1])}}}, {{"ping": {{}}}}]'
     "<|tools_suffix|>", "I look.", [WEATHER, PING]),
    ("apertus", '<|tools_prefix|>[{"name": {"arguments": 1}}]<|tools_suffix|>', "",
     [("name", {"arguments": 1})]),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
     f'{json.dumps(WEATHER[1])}}},\n    {{"tool_call_id": "1", "tool_name": "ping", "parameters": {{}}}}\n]'
     "<|END_ACTION|>", "", [WEATHER, PING]),
    ("kimi_k2", "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
     f"<|tool_call_argument_begin|>{json.dumps(WEATHER[1])}<|tool_call_end|><|tool_call_begin|>"
     "functions.ping:1 <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "I look.",
     [WEATHER, PING]),
    ("kimi_k2", "<|tool_call_begin|>a:1:12<|tool_call_argument_begin|>{}<|tool_call_end|>", "",
     [("a:1", {})]),
    ("nemotron", f"I look.\n\n<TOOLCALL>[{object_call(*WEATHER)}, {object_call(*PING)}]</TOOLCALL>\n",
     "I look.", [WEATHER, PING]),
    ("nemotron", '<TOOLCALL>[{"name": "ping", "arguments": "{\\"a\\": 1}"}]</TOOLCALL>', "",
     [("ping", {"a": 1})]),
    ("hunyuan", f"<tool_calls><tool_call>get_weather\n```json\n{json.dumps(WEATHER[1])}\n```</tool_call>"
     "<tool_call>ping\n```json\n{}\n```</tool_call></tool_calls>", "", [WEATHER, PING]),
    ("hunyuan_a13b", f"I look. <tool_calls>[{object_call(*WEATHER)}, {object_call(*PING)}]</tool_calls>",
     "I look.", [WEATHER, PING]),
    ("hunyuan_a13b", f"<tool_calls>[\n    {object_call(*PING)}\n]</tool_calls>", "", [PING]),
    ("phi", f"functools[{object_call(*PING)}]", "", [PING]),
    ("phi", 2 * f"<|tool_call|>{object_call(*PING)}<|/tool_call|>", "", [PING, PING]),
    ("phi", "use functools, or functools[int]", "use functools, or functools[int]", []),
    ("deepseek_v3", f"Hm{ALL_BEGIN}{BEGIN}function{SEP}get_weather\n```json\n{json.dumps(WEATHER[1])}\n```"
     f"{END}\n{BEGIN}function{SEP}ping\n```json\n{{}}\n```{END}{ALL_END}", "Hm", [WEATHER, PING]),
    ("deepseek_v31", f"{ALL_BEGIN}{BEGIN}get_weather{SEP}{json.dumps(WEATHER[1])}{END}{BEGIN}ping{SEP}{{}}"
     f"{END}{ALL_END}", "", [WEATHER, PING]),
    ("deepseek_v31", f"{ALL_BEGIN}{BEGIN}ping{SEP}{END}{BEGIN}ping{SEP}null{END}{ALL_END}", "", [PING, PING]),
    ("deepseek_v3", f"{BEGIN}function{SEP}ping\n```json\n\n```{END}", "", [PING]),
    ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>\n P\n</arg_value></tool_call>", "",
     [("get_weather", {"city": "\n P\n"})]),
    ("glm", 'I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>P "x"\ny</arg_value>\n'
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>ping</tool_call>",
     "I look.", [("get_weather", {"city": 'P "x"\ny', "days": 3}), PING]),
    ("glm47", "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>P </arg_key> </tool_call>\n"
     "</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
     "<tool_call>ping</tool_call><tool_call>ping\n</tool_call>", "I look.",
     [("get_weather", {"city": "P </arg_key> </tool_call>\n", "days": 3}), PING, PING]),
    ("minimax_m2", 'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">P "x"\n</invoke>\n </minimax:tool_call></parameter>\n'
     '<parameter name="days">3</parameter>\n<parameter name="where">{"a": "</invoke>"}</parameter>\n'
     '<parameter name="part">\n-1.5\n</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n'
     "</minimax:tool_call>", "I look.",
     [("get_weather", {"city": 'P "x"\n</invoke>\n </minimax:tool_call>', "days": 3,
                       "where": {"a": "</invoke>"}, "part": -1.5}), PING]),
    ("minimax_m2", "<minimax:tool_call>\n<invoke name=ping>\n</invoke>\n</minimax:tool_call>",
     "<minimax:tool_call>\n<invoke name=ping>\n</invoke>\n</minimax:tool_call>", []),
    ("seed_oss", "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>P\nx</parameter>\n"
     "<parameter=days>3</parameter>\n<parameter=precise>False</parameter>\n</function>\n</seed:tool_call>\n"
     "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>", "",
     [("get_weather", {"city": "P\nx", "days": 3, "precise": False}), PING]),
    ("harmony", f"<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.get_weather <|constrain|>json<|message|>{json.dumps(WEATHER[1])}<|call|>"
     "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>", "Well.",
     [WEATHER, PING]),
    ("qwen3_coder", "I look.\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n</function>\n"
     "<function=ping>\n</function>\n</tool_call>", "I look.", [("get_weather", {"days": 3}), PING]),
    ("qwen3_coder", "<function=ping></function> So <function= and <tool_call> <function", "So <function= and "
     "<tool_call> <function", [PING]),
    ("qwen3_coder", "<tool_call>\n<function=ping>\n</function>\n<function=get_weather>\n<parameter=unit>None"
     "</parameter></function>\n</tool_call>", "", [PING, ("get_weather", {"unit": None})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n007 </param\n\n</parameter>\n"
     "<parameter=days>\n12\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n"
     '<parameter=precise>\nTrue\n</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n'
     "<parameter=level>high</parameter>\n<parameter=part>soon</parameter>\n"
     "<parameter=more>5</parameter>\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=ping>\n</function>\n</tool_call>", "",
     [("get_weather", {"city": "007 </param\n", "days": 12, "unit": None, "precise": True,
                       "where": {"a": [1]}, "level": "high", "part": "soon", "more": "5"}), PING]),
]  # fmt: skip

# format, answer, content, complete calls
BROKEN = [
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_end|>",
     "<|tool_call_begin|>functions.ping:0<|tool_call_end|>", []),
    ("apertus", '<|tools_prefix|>[{"ping": {}}, {"ping": {}, "f": {}}]<|tools_suffix|>',
     ', {"ping": {}, "f": {}}]<|tools_suffix|>', [("ping", "{}")]),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "parameters": {}}]<|END_ACTION|>',
     '<|START_ACTION|>[{"tool_call_id": "0", "parameters": {}}]<|END_ACTION|>', []),
    ("hunyuan", "<tool_calls><tool_call>ping\n```json\n[]\n```</tool_call></tool_calls>",
     "<tool_call>ping\n```json\n[]\n```</tool_call>", []),
    ("nemotron", '<TOOLCALL>[{"name": "ping"}, {"name": "f", "arguments": {"a": "]</TOOLCALL>',
     ', {"name": "f", "arguments": {"a": "]</TOOLCALL>', [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>z',
     '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>z', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b',
     '<tool_call>{"name": "f", "arguments": {"a": "b', []),
    ("hermes", 'Hm\n<tool_call>{"name": "f", "arguments": {] <tool_call>{"name": "ping"}</tool_call>',
     'Hm\n<tool_call>{"name": "f", "arguments": {]', [("ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping"}\n{"name": "f", "arguments": [1]}</tool_call>',
     '{"name": "f", "arguments": [1]}</tool_call>', [("ping", "{}")]),
    ("minimax_m2", '<minimax:tool_call><invoke name="ping"></invoke><invoke name="ping"><parameter>',
     '<invoke name="ping"><parameter>', [("ping", "{}")]),
    ("glm47", "<tool_call>ping<arg_key>a</arg_key>1</tool_call>",
     "<tool_call>ping<arg_key>a</arg_key>1</tool_call>", []),
    ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>x</function>\n</seed:tool_call>",
     "<seed:tool_call>\n<function=f>\n<parameter=a>x</function>\n</seed:tool_call>", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x", "<tool_call><function=f><parameter=a>x", []),
    ("qwen3_coder", "Use <function=f> <function=f><parameter=a>x</function>", "Use <function=f> <function=f>"
     "<parameter=a>x</function>", []),
    ("pythonic", "[ping(a=1, b=", "[ping(a=1, b=", []),
    ("lfm2", "<|tool_call_start|>[ping(a='it's')]<|tool_call_end|>",
     "<|tool_call_start|>[ping(a='it's')]<|tool_call_end|>", []),
    ("lfm2", "<|tool_call_start|>[ping(), ping(a=b'')]<|tool_call_end|>", ", ping(a=b'')]<|tool_call_end|>",
     [("ping", "{}")]),
    ("pythonic", "[ping(a=1), ping(b=<)] <", ", ping(b=<)] <", [("ping", '{"a": 1}')]),
]  # fmt: skip

"""What answers think: each format at every split, alone and before content and calls, and its tokens."""

from __future__ import annotations

import json
import re
import typing

import pytest
from answers import ALL_BEGIN, ALL_END, BEGIN, END, SAMPLES, SCHEMAS, SEP
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_lines import num_lines
from quire.config.server import ReasoningFormatName
from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, ReasoningDelta
from quire.dialogue.formats import FORMATS
from quire.dialogue.reasoning.formats import (
    REASONING_FORMATS,
    ExpectedReasoning,
    expected_reasoning,
    reasoning_format_of_template,
)
from quire.dialogue.reasoning.tokens import ReasoningTokens

MARKED = [name for name, one in REASONING_FORMATS.items() if not one.in_messages]
TRICKY = 'a < b, <tool_call> is {"name": "ping"}, </thin\n\n[/THINK <| é漢🙂 <|END'
CALL = '<tool_call>\n{"name": "ping", "arguments": {"a": "<think>"}}\n</tool_call>'


def told(name, pieces, *, is_open=False, tools=None):
    """(reasoning, content, calls) of an answer in these pieces, in which the reasoning comes first."""
    reasoning = ExpectedReasoning(REASONING_FORMATS[name], is_open)
    marks = reasoning.format.content_marks
    parser = AnswerParser(None if tools is None else FORMATS[tools], SCHEMAS, reasoning, marks)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    kinds = [isinstance(event, ReasoningDelta) for event in events]
    assert kinds == sorted(kinds, reverse=True)
    calls = [[one.name, ""] for one in events if isinstance(one, CallBegin)]
    for event in events:
        if isinstance(event, ArgumentsDelta):
            calls[event.index][1] += event.text
    texts = [
        "".join(one.text for one in events if isinstance(one, kind))
        for kind in (ReasoningDelta, ContentDelta)
    ]
    return *texts, [(called, json.loads(arguments)) for called, arguments in calls]


def at_every_split(name, answer, expected, **fields):
    assert told(name, answer, **fields) == expected
    for at in range(len(answer)):
        assert told(name, [answer[:at], answer[at:]], **fields) == expected


@pytest.mark.parametrize("name", MARKED)
def test_each_format_at_every_split(name):
    one = REASONING_FORMATS[name]
    reasoning = TRICKY.replace(one.end, "")
    answer = f"{reasoning}\n{one.end}\n\nIt is {one.end} fine.\n"
    expected = (reasoning, f"It is {one.end} fine.\n", [])
    at_every_split(name, f"{one.start}\n{answer}", expected)
    at_every_split(name, answer, expected, is_open=True)
    at_every_split(name, f"\n{one.start}{answer}", expected, is_open=True)


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "pythonic"])
def test_a_reasoning_before_content_and_calls(tools):
    calls = {
        "hermes": f"Well.\n{CALL}",
        "llama3_json": '{"name": "ping", "parameters": {}}',
        "pythonic": "[ping()]",
    }
    content = "Well." if tools == "hermes" else ""
    called = [("ping", {"a": "<think>"} if tools == "hermes" else {})]
    answer = f"<think>\nI call {calls[tools]}.\n</think>\n\n{calls[tools]}"
    at_every_split("think", answer, (f"I call {calls[tools]}.", content, called), tools=tools)


@pytest.mark.parametrize(
    ("answer", "is_open", "expected"),
    [
        ("<think>\n\n</think>\n\nHi", False, ("", "Hi", [])),
        ("</think>Hi", True, ("", "Hi", [])),
        ("Hm, and then ", True, ("Hm, and then", "", [])),
        ("<think>Hm </thin", False, ("Hm </thin", "", [])),
        (" Hi <think>no</think> ", False, ("", " Hi <think>no</think> ", [])),
        ("<thin", False, ("", "<thin", [])),
        (" \n", False, ("", " \n", [])),
        ("", True, ("", "", [])),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c", [])),
    ],
)  # fmt: skip
def test_unusual_answers(answer, is_open, expected):
    at_every_split("think", answer, expected, is_open=is_open)


@pytest.mark.parametrize(
    ("name", "answer", "content"),
    [
        ("hunyuan", "<answer>\n1 < 2, </ans\n</answer>", "1 < 2, </ans"),
        ("hunyuan", "It is.\n", "It is.\n"),
        ("hunyuan", "<answer>\nIt is.\n", "It is.\n"),
        ("hunyuan", "<answer></answer>", ""),
        ("ernie", "\n<response>\nIt is.\n</response>\n", "It is."),
        ("cohere", "<|START_RESPONSE|> <co>So</co: 0:[1]>.<|END_RESPONSE|>", "<co>So</co: 0:[1]>."),
        ("cohere", "<|START_TEXT|>It is.<|END_TEXT|>", "It is."),
    ],
)  # fmt: skip
def test_marks_around_content_are_no_part_of_it(name, answer, content):
    one = REASONING_FORMATS[name]
    for begin, reasoning in ((f"{one.start}\nHm.\n{one.end}\n", "Hm."), ("", "")):
        whole = begin + answer
        expected = (reasoning, content, [])
        at_every_split(name, whole, expected)
        assert told(name, whole, tools="hunyuan_a13b") == expected


def test_marks_around_content_are_dropped_where_the_prompt_has_ended_reasoning():
    marks = REASONING_FORMATS["hunyuan"].content_marks
    parser = AnswerParser(None, {}, None, marks)
    assert parser.feed("<answer>\nYes.\n</answer>") + parser.finish() == [ContentDelta("Yes.")]


# model, its formats, whether the prompt begins reasoning, an answer that reasons, has content, and calls
WHOLE = [
    ("Qwen3.5", "think", "qwen3_coder", True,
     "Hm.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
    ("Gemma 4", "gemma4", "gemma4", False,
     "<|channel>thought\nHm.\n<channel|>I look."
     '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'),
    ("LFM2.5", "think", "lfm2", False,
     "<think>Hm.</think>I look.<|tool_call_start|>[get_weather(city='Oslo', days=3)]<|tool_call_end|>"),
    ("GLM-4.5", "think", "glm", False,
     "\n<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
     "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
    ("GLM-4.7", "think", "glm47", True,
     "Hm.</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
     "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"),
    ("DeepSeek V3.1", "think", "deepseek_v31", True,
     f'Hm.</think>I look.{ALL_BEGIN}{BEGIN}get_weather{SEP}{{"city": "Oslo", "days": 3}}{END}{ALL_END}'),
    ("DeepSeek V3", "think", "deepseek_v3", True,
     f'Hm.\n</think>\n\nI look.{ALL_BEGIN}{BEGIN}function{SEP}get_weather\n```json\n'
     f'{{"city": "Oslo", "days": 3}}\n```{END}{ALL_END}'),
    ("Ministral 3", "mistral", "mistral", False,
     '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}'),
    ("Seed-OSS", "seed", "seed_oss", False,
     "<seed:think>Hm. <seed:cot_budget_reflect></seed:cot_budget_reflect>\n</seed:think>\nI look.\n"
     "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n"
     "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"),
    ("MiniMax M2", "think", "minimax_m2", True,
     'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">Oslo</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
     "</minimax:tool_call>"),
    ("EXAONE 4", "think", "hermes", True,
     'Hm.\n</think>\n\nI look.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
     "</tool_call>"),
    ("ERNIE 4.5", "ernie", "hermes", True,
     'Hm.\n</think>\n\n<response>\nI look.\n</response>\n\n<tool_call>\n'
     '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'),
    ("HunYuan A13B", "hunyuan", "hunyuan_a13b", False,
     '<think>\nHm.\n</think>\n<answer>\nI look.<tool_calls>'
     '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]</tool_calls>\n</answer>'),
    ("Nemotron Nano 2", "think", "nemotron", True,
     'Hm.\n</think>\n\nI look.\n\n<TOOLCALL>'
     '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]</TOOLCALL>\n'),
    ("Apertus", "apertus", "apertus", False,
     "<|inner_prefix|>Hm.<|inner_suffix|>I look."
     '<|tools_prefix|>[{"get_weather": {"city": "Oslo", "days": 3}}]<|tools_suffix|>'),
    ("Command A", "cohere", "cohere", False,
     "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>I look.<|END_TEXT|><|START_ACTION|>[\n"
     '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}\n'
     "]<|END_ACTION|>"),
]  # fmt: skip


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("reasoning", "tools", "is_open", "answer"), [row[1:] for row in WHOLE])
def test_a_whole_answer_of_a_model_at_every_split(reasoning, tools, is_open, answer):
    calls = [("get_weather", {"city": "Oslo", "days": 3})]
    said, content, called = told(reasoning, [answer], is_open=is_open, tools=tools)
    assert (said.split()[0], content, called) == ("Hm.", "I look.", calls)
    at_every_split(reasoning, answer, (said, content, calls), is_open=is_open, tools=tools)


QWEN_CALL = "<tool_call>\n<function=ping>\n<parameter=a>\n</think\n</parameter>\n</function>\n</tool_call>"
CALLED = [("ping", {"a": "</think"})]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"Hm.\n{QWEN_CALL}", ("Hm.", "", CALLED)),
        (f"Hm.\n\n{QWEN_CALL}\n{QWEN_CALL}\n", ("Hm.", "", 2 * CALLED)),
        (QWEN_CALL, ("", "", CALLED)),
        (f"I write {QWEN_CALL}.\nSo:\n{QWEN_CALL}", (f"I write {QWEN_CALL}.\nSo:", "", CALLED)),
        (f"I write {QWEN_CALL}", ("I write", "", CALLED)),
        (f"I write {QWEN_CALL}\n</think>\n\nHi", (f"I write {QWEN_CALL}", "Hi", [])),
        (f"I write {QWEN_CALL}\n</think>\n\n{QWEN_CALL}", (f"I write {QWEN_CALL}", "", CALLED)),
        ("I write <tool_call> </think>Hi", ("I write <tool_call>", "Hi", [])),
        ("I write <tool_call>\n<function=ping> ", ("I write <tool_call>\n<function=ping>", "", [])),
        ("Hm <tool_call>no</tool_call>", ("Hm <tool_call>no</tool_call>", "", [])),
        ("Hm <tool_call></tool_call>", ("Hm <tool_call></tool_call>", "", [])),
        ("Hm <function=ping> </function>\n</tool_call>", ("Hm", "", [("ping", {})])),
        (f"Hm {QWEN_CALL[:-12]} more</tool_call>", (f"Hm {QWEN_CALL[:-12]} more</tool_call>", "", [])),
    ],
)  # fmt: skip
def test_calls_with_which_an_answer_ends_in_its_reasoning(answer, expected):
    at_every_split("think", answer, expected, is_open=True, tools="qwen3_coder")


@pytest.mark.parametrize("end", ["", "\n", "\n<tool_", "\n<tool_call>\n<func"])
def test_calls_in_reasoning_that_is_cut_off_are_reasoning(end):
    expected = ExpectedReasoning(REASONING_FORMATS["think"], is_open=True)
    parser = AnswerParser(FORMATS["qwen3_coder"], SCHEMAS, expected)
    events = parser.feed(f"Hm.\n{QWEN_CALL}{end}") + parser.finish(is_cut_off=True)
    assert "".join(one.text for one in events) == f"Hm.\n{QWEN_CALL}{end}".rstrip()
    assert {type(one) for one in events} == {ReasoningDelta}


@pytest.mark.parametrize("tools", ["qwen3_coder", "hermes", "deepseek_v31", "lfm2", "gemma4"])
@given(st.data())
@settings(max_examples=25)
def test_reasoning_with_calls_is_told_the_same_at_any_split(tools, data):
    marks = (*FORMATS[tools].marks, *REASONING_FORMATS["think"].marks)
    whole = [answer for name, answer, *_ in SAMPLES if name == tools]
    part = st.sampled_from([*marks, *whole, "\n", "ping", "{}", "f(a=1)"]) | st.text(max_size=3)
    answer = "".join(data.draw(st.lists(part, max_size=8)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]

    def all_told(given):
        expected = ExpectedReasoning(REASONING_FORMATS["think"], is_open=True)
        parser = AnswerParser(FORMATS[tools], SCHEMAS, expected)
        events = [event for piece in given for event in parser.feed(piece)] + parser.finish()
        texts = dict.fromkeys((ReasoningDelta, ContentDelta), "")
        calls, written = [], ""
        for event in events:
            if isinstance(event, CallBegin | CallEnd):
                calls += [written] if isinstance(event, CallEnd) and event.is_complete else []
                written = ""
            elif isinstance(event, ArgumentsDelta):
                written += event.text
            else:
                texts[type(event)] += event.text
        return texts, calls, parser.has_calls

    assert all_told(pieces) == all_told([answer])


def test_reasoning_that_only_mentions_a_call_is_not_held_back():
    parser = AnswerParser(
        FORMATS["qwen3_coder"], SCHEMAS, ExpectedReasoning(REASONING_FORMATS["think"], is_open=True)
    )
    assert parser.feed("I write <tool_call> and") == [ReasoningDelta("I write <tool_call> and")]
    assert parser.feed(" <tool_call>\n<function=ping>\n<param") == []
    assert parser.feed(" no") == [ReasoningDelta(" <tool_call>\n<function=ping>\n<param no")]


def test_marks_around_all_calls_in_reasoning():
    call = f"{ALL_BEGIN}{BEGIN}ping{SEP}{{}}{END}{ALL_END}"
    answer = f"I write {ALL_BEGIN} or {ALL_END}, {call}"
    expected = (f"I write {ALL_BEGIN} or {ALL_END},", "", [("ping", {})])
    at_every_split("think", answer, expected, is_open=True, tools="deepseek_v31")


def test_calls_beside_marks_around_content():
    answer = '<think>Hm.</think>\n<answer>\nWell. <tool_calls>[{"name": "ping"}]</tool_calls>\n</answer>'
    at_every_split("hunyuan", answer, ("Hm.", "Well.", [("ping", {})]), tools="hunyuan_a13b")


@pytest.mark.parametrize("name", MARKED)
@given(st.data())
@settings(max_examples=25)
def test_nothing_of_a_reasoning_is_content_nor_the_other_way_round(name, data):
    one = REASONING_FORMATS[name]
    part = st.sampled_from(
        [one.start, one.end[:-1], one.end[1:], one.end[:3], "\n", "<tool_call>"]
    ) | st.text(max_size=5)
    text = st.lists(part, max_size=8).map("".join)
    reasoning = data.draw(text.filter(lambda text: one.end not in text + one.end[:-1])).strip()
    content = data.draw(text).strip()
    is_open = data.draw(st.booleans())
    if is_open and reasoning.startswith(one.start):
        reasoning = "x" + reasoning
    answer = f"{'' if is_open else one.start}{reasoning} {one.end}\n{content}"
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    assert told(name, pieces, is_open=is_open) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>old</think><|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("", False),
    ],
)
def test_what_a_prompt_begins(prompt, is_open):
    one = REASONING_FORMATS["think"]
    expected = None if is_open is None else ExpectedReasoning(one, is_open)
    assert expected_reasoning(one, prompt) == expected


def test_a_prompt_may_go_on_after_the_first_mark():
    one = REASONING_FORMATS["seed"]
    prompt = "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    assert expected_reasoning(one, prompt) == ExpectedReasoning(one, is_open=True)


@pytest.mark.parametrize(
    ("continued", "is_open"),
    [("", False), ("\n", False), ("Well", None), ("<think>Hm", True), ("<think>Hm</think>So", None)],
)
def test_what_the_beginning_of_an_answer_begins(continued, is_open):
    one = REASONING_FORMATS["think"]
    expected = None if is_open is None else ExpectedReasoning(one, is_open)
    assert expected_reasoning(one, f"<|im_start|>assistant\n{continued}", continued) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}", "think"),
        ("{{ '<|Assistant|><think>\\n' }}", "think"),
        ("[SYSTEM_PROMPT]Draft in [THINK] your reasoning [/THINK]", "mistral"),
        ("Write your reasoning after 'Here is my thought process:' and", "granite"),
        ("<seed:think>", "seed"),
        ("<|START_THINKING|><|END_THINKING|>", "cohere"),
        ("{{ '<|channel>thought\\n<channel|>' }}", "gemma4"),
        ("<|extra_4|> <|extra_0|> {{- '<think>\\n\\n</think>\\n' }}", "hunyuan"),
        ("[|assistant|]\\n<think>\\n\\n</think>", "think"),
        ("{{ '<think>\\n' }}{{ '<response>\\n' }}", "ernie"),
        ("{{ '<think>' ~ '\\n' }}{{- '\\n<response>' }}{{- '</response>' }}", "think"),
        ("I think so", None),
    ],
)
def test_the_format_of_a_template(template, name):
    assert reasoning_format_of_template(template) == name


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_all_that_may_be_a_token_in_a_mark_is_a_mark_itself(name):
    one = REASONING_FORMATS[name]
    tokens = re.findall(r"<[^<>]+>", one.start + one.end)
    assert set(tokens) <= set(one.marks)


def test_each_format_can_be_configured():
    assert {"auto", "none", *REASONING_FORMATS} == set(typing.get_args(ReasoningFormatName))


@given(st.data())
def test_tokens_of_reasoning_are_counted(data):
    is_open, is_token = data.draw(st.booleans()), data.draw(st.booleans())
    marks = ["<think>", "</think>"] if is_token else ["<th", "ink>", "</", "think", ">", "</think>b"]
    tokens = data.draw(st.lists(st.sampled_from([*marks, "a", " ", "\n", "b</"]), max_size=12))
    texts = sorted(set(tokens))
    ids = [texts.index(token) for token in tokens]
    counter = ReasoningTokens(
        ExpectedReasoning(REASONING_FORMATS["think"], is_open),
        texts.__getitem__,
        lambda text: texts.index(text) if is_token and text in texts else None,
    )
    for end in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3))):
        counter.update(ids[:end])
    assert counter.update(ids) == num_reasoning_tokens(tokens, is_open)


def num_reasoning_tokens(tokens, is_open):
    """From the definition: those that end behind the first mark and before the second is complete."""
    num_begun = 0
    if not is_open:
        prefixes = ["".join(tokens[:count]).lstrip() for count in range(len(tokens) + 1)]
        begun = [count for count, text in enumerate(prefixes) if text.startswith("<think>")]
        if not begun:
            return 0
        num_begun = begun[0]
    reasoning = tokens[num_begun:]
    counts = [count for count in range(len(reasoning) + 1) if "</think>" not in "".join(reasoning[:count])]
    return counts[-1]


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    "repeated",
    [
        "word </thi ", "\n ", "<tool_call>", "<tool_call></tool_call>", "</tool_call> x <tool_call>",
        "<function=ping><parameter=a>", "<function=ping></function>",
    ],
)  # fmt: skip
def test_the_cost_is_linear_in_the_text(repeated, size):
    def cost(times):
        expected = ExpectedReasoning(REASONING_FORMATS["think"], is_open=True)
        parser = AnswerParser(FORMATS["qwen3_coder"], {}, expected)
        text = times * repeated + "</think>" + times * repeated

        def read():
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()

        return num_lines(read)

    assert cost(400) < 4.5 * cost(100)

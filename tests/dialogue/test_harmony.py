"""Answers in harmony: published and crafted ones at every split, random ones, their reasoning and tokens."""

from __future__ import annotations

import json
import re

import pytest
from answers import SCHEMAS, TRICKY
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_lines import num_lines
from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.earlier_turns import turns_for_template
from quire.dialogue.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, ReasoningDelta
from quire.dialogue.formats import FORMATS, format_of_template
from quire.dialogue.harmony_messages import MARKS, MAX_HEADER_LENGTH
from quire.dialogue.reasoning.formats import (
    REASONING_FORMATS,
    ExpectedReasoning,
    expected_reasoning,
    reasoning_format_of_template,
)
from quire.dialogue.reasoning.text import ReasoningText
from quire.dialogue.reasoning.tokens import ReasoningTokens

HARMONY = FORMATS["harmony"]
REASONING = REASONING_FORMATS["harmony"]
ASSISTANT = "<|start|>assistant"
WEATHER = {"city": TRICKY + "<|call|><|end|>", "days": 2}
FORECAST = json.dumps(WEATHER, ensure_ascii=False)


def told(pieces, *, has_tools=True, is_open=False, reasons=True, is_cut_off=False):
    """(reasoning, content, calls) of an answer in these pieces."""
    reasoning = ExpectedReasoning(REASONING, is_open) if reasons else None
    parser = AnswerParser(HARMONY if has_tools else None, SCHEMAS, reasoning)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(is_cut_off=is_cut_off)
    calls = [(one.name, []) for one in events if isinstance(one, CallBegin)]
    for event in events:
        if isinstance(event, ArgumentsDelta):
            calls[event.index][1].append(event.text)
    ends = [one for one in events if isinstance(one, CallEnd) and (one.is_complete or is_cut_off)]
    calls = [calls[end.index] for end in ends]
    texts = [
        "".join(one.text for one in events if isinstance(one, kind))
        for kind in (ReasoningDelta, ContentDelta)
    ]
    return *texts, [(name, "".join(arguments)) for name, arguments in calls]


def at_every_split(answer, expected, **fields):
    assert told([answer], **fields) == expected
    assert told(answer, **fields) == expected
    for at in range(len(answer)):
        assert told([answer[:at], answer[at:]], **fields) == expected


ACTION_PLAN = """**Action plan**:
1. Generate an HTML file
2. Generate a JavaScript for the Node.js server
3. Start the server
---
Will start executing the plan step by step"""

# answer, reasoning, content, calls
PUBLISHED = [
    ('<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>\n'
     "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
     'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.', "2 + 2 = 4.", []),
    ("<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>"
     'commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
     "Need to use function get_weather.", "", [("get_weather", '{"location":"San Francisco"}')]),
    ("<|channel|>analysis<|message|>{long chain of reasoning}<|end|><|start|>assistant<|channel|>commentary"
     f"<|message|>{ACTION_PLAN}<|end|><|start|>assistant<|channel|>commentary to=functions.generate_file"
     '<|constrain|>json<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
     "{long chain of reasoning}", ACTION_PLAN,
     [("generate_file", '{"template": "basic_html", "path": "index.html"}')]),
]  # fmt: skip
"""Of OpenAI's description of the format."""

CRAFTED = [
    # the recipient in the role, a type without a mark, no end, which is no text
    (f" to=functions.get_weather<|channel|>commentary json<|message|>{FORECAST}", "", "",
     [("get_weather", FORECAST)]),
    (f"<|channel|>analysis<|message|>a<|end|>{ASSISTANT} to=functions.ping<|channel|>commentary<|message|>"
     "{}<|call|>", "a", "", [("ping", "{}")]),
    # several reasoning, also after a preamble
    (f"<|channel|>analysis<|message|>a<|end|>{ASSISTANT}<|channel|>analysis<|message|>b<|end|>{ASSISTANT}"
     f"<|channel|>commentary<|message|>Well.<|end|>{ASSISTANT}<|channel|>analysis<|message|> c <|end|>"
     f"{ASSISTANT}<|channel|>commentary to=functions.ping code<|message|> {{}} <|call|>",
     "a\n\nb\n\n c ", "Well.", [("ping", "{}")]),
    (f"<|channel|>commentary<|message|>One.<|end|>{ASSISTANT}<|channel|>final<|message|>\nTwo.\n<|return|>",
     "", "One.\n\n\nTwo.\n", []),
    # marks that are left out, doubled or in the wrong place
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", []),
    (f"<|channel|>analysis<|message|>a{ASSISTANT}<|channel|>final<|message|>b<|end|><|end|>", "a", "b", []),
    (f"Well, 1 < 2 <| 3<|end|>{ASSISTANT}<|message|>And <|message|> more", "",
     "Well, 1 < 2 <| 3\n\nAnd <|message|> more", []),
    (f"{ASSISTANT}<|channel|>final<|message|>b<|return|> ", "", "b", []),
    ("<|channel|>commentary to=functions.ping<|channel|>commentary json<|message|>{}<|call|>", "", "",
     [("ping", "{}")]),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>reasoning<|message|>b", "", "b", []),
    ("a<|end|>b<|end|> \n<|return|>", "", "a\n\nb", []),
    (" to=be or not", "", " to=be or not", []),
    ("to=be <|end|>", "", "to=be ", []),
    (" to=functions.pi", "", "", []),
    (" \n", "", " \n", []),
    ("", "", "", []),
    ("<|channel|>commentary to=functions.<|message|>{}", "", "{}", []),
    # tools of the model's own
    ("<|channel|>analysis to=python code<|message|>print('{}')\n<|call|>", "print('{}')\n", "", []),
    ("<|channel|>commentary to=python<|message|>a <|message|> b<|call|>", "", "a <|message|> b", []),
    ("<|channel|>commentary to=python code<|message|> print('{}')<|call|>", "", " print('{}')", []),
    # calls that are malformed
    ('<|channel|>commentary to=functions.f<|message|>{"a": <b>}<|call|>z', "", '{"a": <b>}\n\nz', []),
    ('<|channel|>analysis to=functions.f<|message|>{"a": "<|call|>b', '{"a": "b', "", []),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reasoning", "content", "calls"), [*PUBLISHED, *CRAFTED])
def test_a_sample_at_every_split(answer, reasoning, content, calls):
    at_every_split(answer, (reasoning, content, calls))


@pytest.mark.parametrize(("answer", "reasoning", "content", "calls"), PUBLISHED)
def test_an_answer_may_be_cut_off_anywhere(answer, reasoning, content, calls):
    tokens = re.findall(r"<\|\w+\|>|.", answer, re.DOTALL)
    for count in range(len(tokens)):
        some_reasoning, some_content, some_calls = told(tokens[:count], is_cut_off=True)
        assert reasoning.startswith(some_reasoning)
        assert content.startswith(some_content)
        for (name, arguments), (whole_name, whole_arguments) in zip(some_calls, calls, strict=False):
            assert (name, whole_arguments[: len(arguments)]) == (whole_name, arguments)
            assert arguments != "{}"


def test_without_tools_a_call_is_text():
    answer = PUBLISHED[1][0]
    at_every_split(answer, (PUBLISHED[1][1], '{"location":"San Francisco"}', []), has_tools=False)


def test_without_reasoning_a_reasoning_is_content():
    answer, reasoning, content, _ = PUBLISHED[0]
    at_every_split(answer, ("", f"{reasoning}\n\n{content}", []), reasons=False)


def test_a_reasoning_may_have_begun():
    at_every_split(f"Hm<|end|>{ASSISTANT}<|channel|>final<|message|>b", ("Hm", "b", []), is_open=True)


@pytest.mark.parametrize("missing", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("rest", ["<|message|>a", "<|channel|>final<|message|>a", "<|end|>a", ""])
def test_a_header_has_a_maximum_length(missing, rest):
    begin = "<|channel|>final "
    header = begin + "x" * (MAX_HEADER_LENGTH - len(begin) - missing)
    whole = told([header + rest])
    assert told(header + rest) == whole
    if rest == "<|message|>a":
        assert whole[1] == ("a" if missing >= 0 else header + rest)


TEXTS = st.text(max_size=5) | st.sampled_from(
    ["<|", "|>", " to=", "final", "\n", "{", '"', "<|en", "assistant"]
)
PARTS = TEXTS | st.sampled_from([*MARKS, ASSISTANT, "analysis", "commentary to=functions.ping", '{"a": 1}'])


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_arbitrary_text_is_told_the_same_at_any_split(data, has_tools, is_open):
    answer = "".join(data.draw(st.lists(PARTS, max_size=30)))
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    fields = {"has_tools": has_tools, "is_open": is_open}
    assert told(pieces, **fields) == told([answer], **fields) == told(answer, **fields)


BODIES = st.lists(TEXTS, max_size=6).map("".join).filter(lambda text: not any(mark in text for mark in MARKS))
CALLED = st.dictionaries(st.text(max_size=5), st.text() | st.sampled_from(MARKS) | st.integers(), max_size=3)
MESSAGES = st.lists(
    st.tuples(st.just("analysis") | st.just("commentary") | st.just("final"), BODIES), max_size=4
)


@given(MESSAGES, st.none() | CALLED, st.booleans(), st.data())
@settings(max_examples=150)
def test_each_message_is_told_as_what_it_is(messages, called, is_in_role, data):
    written = [f"<|channel|>{channel}<|message|>{body}<|end|>" for channel, body in messages]
    if called is not None:
        arguments, recipient = json.dumps(called), " to=functions.ping"
        written.append(
            f"{recipient}<|channel|>commentary json<|message|>{arguments}<|call|>"
            if is_in_role
            else f"<|channel|>commentary{recipient} <|constrain|>json<|message|>{arguments}<|call|>"
        )
    answer = ASSISTANT.join(written)
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=4)))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    bodies = [
        "\n\n".join(body for channel, body in messages if body and (channel == "analysis") == is_reasoning)
        for is_reasoning in (True, False)
    ]
    assert told(pieces) == (*bodies, [] if called is None else [("ping", json.dumps(called))])


@given(st.lists(PARTS, max_size=20), st.booleans(), st.data())
def test_parts_that_are_reasoning_or_not_are_the_whole_text(parts, is_open, data):
    answer = "".join(parts)
    ends = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=4)))
    reading = ReasoningText(ExpectedReasoning(REASONING, is_open))
    pieces = [answer[a:b] for a, b in zip([0, *ends], [*ends, len(answer)], strict=True)]
    known = [part for piece in pieces for part in reading.feed(piece)] + reading.finish()
    assert "".join(text for text, _ in known) == answer
    _, content, calls = told([answer], has_tools=False, is_open=is_open)
    assert not calls
    assert "".join(text for text, is_reasoning in known if not is_reasoning) == content.replace(
        "\n\n", ""
    ) or ("\n\n" in content)


@pytest.mark.parametrize("are_tokens", [True, False])
def test_tokens_of_reasoning_are_counted(are_tokens):
    counted = ["We", " need", " <", "b>", "So", "!"]
    tokens = [
        "<|channel|>", "analysis", "<|message|>", *counted[:4], "<|end|>", "<|start|>", "assistant",
        "<|channel|>", "commentary", "<|message|>", "Well", "<|end|>", "<|start|>", "assistant",
        "<|channel|>", "analysis", "<|message|>", *counted[4:], "<|end|>", "<|start|>", "assistant",
        "<|channel|>", "final", "<|message|>", "Yes", "<|return|>",
    ]  # fmt: skip
    num_expected = len(counted)
    if not are_tokens:  # of the two marks that end reasoning, all tokens but the last
        tokens = [
            part for token in tokens for part in (["<", "|end|", ">"] if token == "<|end|>" else [token])
        ]
        num_expected += 4
    texts = sorted(set(tokens))
    ids = [texts.index(token) for token in tokens]
    for step in (1, 3, len(ids)):
        counter = ReasoningTokens(ExpectedReasoning(REASONING, is_open=False), texts.__getitem__, {}.get)
        for end in range(0, len(ids), step):
            counter.update(ids[:end])
        assert counter.update(ids) == num_expected
    after_header = ids[3:]
    counter = ReasoningTokens(ExpectedReasoning(REASONING, is_open=True), texts.__getitem__, {}.get)
    assert counter.update(after_header) == num_expected


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>assistant<|channel|>final<|message|>", None),
    ],
)
def test_what_a_prompt_begins(prompt, is_open):
    expected = None if is_open is None else ExpectedReasoning(REASONING, is_open)
    assert expected_reasoning(REASONING, prompt) == expected


def test_the_format_is_known_from_the_template():
    template = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'
    assert format_of_template(template) == reasoning_format_of_template(template) == "harmony"


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("<|channel|>analysis<|message|>", "word <|en "),
        ("", "<|end|>"),
        ("", "<|channel|>"),
        ("", "<|start|>assistant<|channel|>analysis<|message|>"),
        ("", "\n "),
        (" to=", "functions"),
        ('<|channel|>commentary to=functions.f<|message|>{"a": "', "x\\n <|call|>"),
        ("<|channel|>commentary to=functions.f<|message|>{]", "</a "),
    ],
)
@pytest.mark.parametrize("size", [1, 7])
def test_the_cost_is_linear_in_the_text(begin, repeated, size):
    def cost(times):
        parser = AnswerParser(HARMONY, SCHEMAS, ExpectedReasoning(REASONING, is_open=False))
        text = begin + times * repeated

        def read():
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()

        return num_lines(read)

    assert cost(400) < 4.5 * cost(100)


def call(call_id, name="ping"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def result(call_id):
    return {"role": "tool", "content": f"of {call_id}", "tool_call_id": call_id}


def test_earlier_turns_have_one_call_each_followed_by_its_results():
    user = {"role": "user", "content": "Hi"}
    reasoning = {"reasoning": "Hm", "thinking": "Hm"}
    turn = {"role": "assistant", "content": "Well.", **reasoning, "tool_calls": [call("a"), call("b")]}
    results = [result("b"), result("x"), result("a")]
    answer = {"role": "assistant", "content": "Yes.", **reasoning}
    joined = {"reasoning": "Hm\n\nWell.", "thinking": "Hm\n\nWell."}
    assert turns_for_template([user, turn, *results, answer, user], HARMONY) == [
        user,
        {"role": "assistant", "content": "", **joined, "tool_calls": [call("a")]},
        result("a"),
        {"role": "assistant", "content": "", "tool_calls": [call("b")]},
        result("b"),
        result("x"),
        answer,
        user,
    ]
    for other in (None, FORMATS["hermes"]):
        assert turns_for_template([user, turn, *results], other) == [user, turn, *results]


def test_ids_of_calls_are_numbered_where_a_template_wants_that():
    turns = []
    for ids in (("a", "b"), ("b",)):
        calls = [call(id_, name) for id_, name in zip(ids, ("ping", "look"), strict=False)]
        turns += [{"role": "assistant", "content": "", "tool_calls": calls}, *map(result, ids)]
    given = [*turns, result("x")]
    numbered = turns_for_template(given, FORMATS["kimi_k2"])
    ids = [one["id"] for turn in numbered for one in turn.get("tool_calls", ())]
    assert ids == ["functions.ping:0", "functions.look:1", "functions.ping:2"]
    answered = [turn["tool_call_id"] for turn in numbered if turn["role"] == "tool"]
    assert answered == ["functions.ping:0", "functions.look:1", "functions.ping:2", "x"]
    assert [one["id"] for one in given[0]["tool_calls"]] == ["a", "b"]


def test_calls_with_one_id_keep_their_results():
    turn = {"role": "assistant", "content": "", "tool_calls": [call("a"), call("a")]}
    turns = turns_for_template([turn, result("a"), result("a")], HARMONY)
    assert [one["role"] for one in turns].count("tool") == 2
    assert [len(one.get("tool_calls", ())) for one in turns] == [1, 0, 0, 1]

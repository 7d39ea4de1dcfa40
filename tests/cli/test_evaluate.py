"""`quire eval`: scores, selection and errors, over an engine that knows some of the answers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeTokenizer, finished_output
from typer.testing import CliRunner, Result

from quire.cli.commands.evaluate import EVAL_FILE, SPARE_TOKENS, Call, Case, read_cases, scored, select
from quire.cli.main import app
from quire.dialogue.formats import FORMATS
from quire.errors import ModelError
from quire.request_output import RequestOutput
from quire.sampling_params import SamplingParams

CASES = [
    Case("add", [{"role": "user", "content": "1 + 1"}], "2"),
    Case("copy", [{"role": "user", "content": "ab"}], "ab"),
    Case("add", [{"role": "user", "content": "2 + 2"}], "4"),
    Case("copy", [{"role": "user", "content": "cd ef gh"}], "cd ef gh"),
]

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class FakeLLM:
    """Copies what it is asked, with white space around."""

    calls: list[tuple[list, SamplingParams]]
    tools: list[Any]
    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        type(self).options = options

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def chat(
        self, messages: list, sampling_params: SamplingParams, *, tools: list, **_: Any
    ) -> list[RequestOutput]:
        type(self).calls.append((messages, sampling_params))
        type(self).tools = tools
        return [
            finished_output(f" {chat[-1]['content']}\n", prompt_tokens=10, cached_tokens=5)
            for chat in messages
        ]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    FakeLLM.calls = []
    module = types.ModuleType("quire.front.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "quire.front.llm", module)
    lines = [
        json.dumps({"task": case.task, "messages": case.messages, "answer": case.answer}) for case in CASES
    ]
    (tmp_path / EVAL_FILE).write_text("\n".join(lines) + "\n")
    return tmp_path


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_table_and_totals(model: Path):
    result = evaluate(str(model))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["add", "2", "0.0%", "10", "50.0%"] in rows
    assert ["copy", "2", "100.0%", "10", "50.0%"] in rows
    assert ["all", "4", "50.0%", "10", "50.0%"] in rows
    assert "tokens/s" in result.stdout


def test_one_greedy_batch_with_room_for_the_longest_answer(model: Path):
    evaluate(str(model), "--max-num-seqs", "7")
    ((messages, sampling),) = FakeLLM.calls
    assert len(messages) == len(CASES)
    assert sampling.is_greedy
    assert sampling.max_tokens == 3 + SPARE_TOKENS
    assert FakeLLM.options["scheduler"].max_num_seqs == 7


def test_json_has_what_the_table_has(model: Path):
    report = json.loads(evaluate(str(model), "--json").stdout)
    assert report["tasks"]["copy"]["exact_match"] == 1.0
    assert report["total"] == {
        "prompts": 4,
        "exact_match": 0.5,
        "mean_prompt_tokens": 10.0,
        "prefix_cache_hit_share": 0.5,
    }
    assert report["output_tokens"] == 3 + 1 + 3 + 3


def test_tasks_and_limit_select(model: Path):
    evaluate(str(model), "--task", "copy", "--limit", "1")
    assert [chat[-1]["content"] for chat in FakeLLM.calls[0][0]] == ["ab"]
    assert select(CASES, [], 0) == [CASES[0], CASES[2], CASES[1], CASES[3]]


def test_an_unknown_task_lists_the_known(model: Path):
    result = evaluate(str(model), "--task", "sing")
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: no cases for sing; tasks in {EVAL_FILE}: add, copy\n",
    )


def test_a_model_without_an_evaluation_file(model: Path):
    (model / EVAL_FILE).unlink()
    result = evaluate(str(model))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {model} has no {EVAL_FILE}; add one with")
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def cases_with_tools(model: Path) -> Path:
    asked = {"task": "tools", "messages": [{"role": "user", "content": CALL}], "answer": "", "tools": [TOOL]}
    with (model / EVAL_FILE).open("a") as file:
        for calls in ([{"name": "add", "arguments": {"b": 2, "a": 1}}], []):
            file.write(json.dumps({**asked, "calls": calls}) + "\n")
    return model


def test_calls_are_compared_by_name_and_arguments(cases_with_tools: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeTokenizer, "chat_template_source", "{{ tools }}<tool_call>", raising=False)
    report = json.loads(evaluate(str(cases_with_tools), "--json").stdout)
    assert report["tasks"]["tools"]["exact_match"] == 0.5
    assert report["tasks"]["copy"]["exact_match"] == 1.0
    assert FakeLLM.tools == [None] * len(CASES) + [[TOOL]] * 2


def test_tools_of_a_model_whose_calls_are_in_no_known_format(
    cases_with_tools: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeTokenizer, "chat_template_source", "{{ tools }}", raising=False)
    result = evaluate(str(cases_with_tools))
    assert (result.exit_code, FakeLLM.calls) == (1, [])
    assert "--task" in result.stderr
    assert evaluate(str(cases_with_tools), "--task", "copy").exit_code == 0


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (CALL, True),
        (f"Yes.{CALL}", False),
        (CALL + CALL, False),
        (CALL.replace("2", "3"), False),
        (CALL.replace('"add"', '"sum"'), False),
        (CALL[:40], False),
        ("3", False),
    ],
)
def test_a_call_must_be_the_whole_answer(text: str, is_right: bool):
    case = Case("tools", [], "", [TOOL], [Call("add", {"a": 1, "b": 2})])
    assert case.is_answered_by(text, FORMATS["hermes"]) is is_right


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", '{"task": "a", "messages": []}', "3",
        '{"task": "a", "messages": [], "answer": "", "tools": [{}]}',
        '{"task": "a", "messages": [], "answer": "", "calls": [{"name": "f"}]}',
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(model: Path, line: str):
    (model / EVAL_FILE).write_text('{"task": "a", "messages": [], "answer": "b"}\n' + line + "\n")
    with pytest.raises(ModelError, match="line 2 of"):
        read_cases(model / EVAL_FILE)


def test_a_file_that_is_not_utf8(model: Path):
    (model / EVAL_FILE).write_bytes(b"\xff")
    with pytest.raises(ModelError, match="is not UTF-8"):
        read_cases(model / EVAL_FILE)


def test_surrounding_space_does_not_count_but_case_does():
    outputs = [finished_output(text) for text in ("\n2 ", "AB", "4", "cd  ef gh")]
    report = scored(CASES, outputs, 2.0)
    assert {task: score.matches for task, score in report.tasks.items()} == {"add": 2, "copy": 0}
    assert report.as_dict()["output_tokens_per_second"] == (1 + 1 + 1 + 3) / 2.0


def test_the_built_in_model_has_questions_for_every_task():
    from quire.models.checkpoints.hub import resolve_model

    tasks = {case.task for case in read_cases(resolve_model("mini") / EVAL_FILE)}
    assert {"qa", "add", "copy", "reverse", "retrieval-200", "retrieval-600", "retrieval-1400"} <= tasks
    assert {"tools-call", "tools-calls", "tools-none", "tools-result"} <= tasks

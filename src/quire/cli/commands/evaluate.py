"""`quire eval`: exact match per task over the questions that come with a model."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.console import stderr_is_terminal
from quire.cli.offline import ready_llm
from quire.cli.options import config_options
from quire.config import EngineConfig
from quire.dialogue.answer_parser import AnswerParser
from quire.dialogue.calls.tool_call_format import ToolCallFormat
from quire.dialogue.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta
from quire.dialogue.formats import FORMATS, format_of_template
from quire.errors import ModelError
from quire.request_output import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from quire.models.text.tokenizer import Tokenizer

EVAL_FILE = "eval.jsonl"
SPARE_TOKENS = 8  # beyond the longest answer or call, so that a longer answer counts as wrong


@config_options(positional=("model",), engine=EngineConfig)
def evaluate(
    engine: EngineConfig,
    *,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="Run only this task; may be repeated."),
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Maximum number of prompts per task. 0: all.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Ask MODEL the questions in its eval.jsonl and report how many answers match exactly.

    Each line of that file is an object with "task", "messages" and "answer", and maybe "tools" and "calls".
    All prompts run greedily in one offline batch, in this process. Surrounding white space is ignored in
    the comparison, and so is how a call is written.

    Examples:
      quire eval
      quire eval --task add --task reverse --limit 50
      quire eval ./my-model --dtype float32 --json
    """
    from quire.models.checkpoints.hub import resolve_model

    cases = select(
        read_cases(resolve_model(engine.model, revision=engine.revision) / EVAL_FILE), task or [], limit
    )
    report = run_cases(engine, cases)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from rich.console import Console

        Console(highlight=False).print(report_table(engine.model, report))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One question: its task, the chat to complete, the correct answer, the tools, and the correct calls."""

    task: str
    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)

    def is_answered_by(self, text: str, call_format: ToolCallFormat | None) -> bool:
        """Whether an answer is correct.

        Args:
            text: the answer.
            call_format: format of its tool calls.
        """
        content, calls = text, list[Call]()
        if self.tools is not None:
            schemas = {
                tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools
            }
            content, calls = content_and_calls(text, AnswerParser(call_format, schemas))
        return content.strip() == self.answer.strip() and calls == self.calls


@dataclasses.dataclass(slots=True)
class Score:
    """Counts for one task, or for all tasks together; token counts are of prompts."""

    prompts: int = 0
    matches: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput, *, is_match: bool) -> None:
        """Count one answered case."""
        self.prompts += 1
        self.matches += is_match
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens

    def as_dict(self) -> dict[str, float]:
        """Return the accuracy and the means shown in the table."""
        return {
            "prompts": self.prompts,
            "exact_match": self.matches / self.prompts,
            "mean_prompt_tokens": self.prompt_tokens / self.prompts,
            "prefix_cache_hit_share": self.cached_tokens / self.prompt_tokens,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Scores by task in the file's order, their sum, and the duration in seconds."""

    tasks: dict[str, Score]
    total: Score
    output_tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "tasks": {name: score.as_dict() for name, score in self.tasks.items()},
            "total": self.total.as_dict(),
            "seconds": self.seconds,
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            "prompt_tokens_per_second": self.total.prompt_tokens / self.seconds,
        }


def read_cases(path: Path) -> list[Case]:
    """Read an evaluation file.

    Raises:
        ModelError: it does not exist, or a line is not an object with task, messages and answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise ModelError(
            f"{path.parent} has no {EVAL_FILE}; add one with lines such as "
            '{"task": ..., "messages": [...], "answer": ...}'
        ) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error}") from None
    cases = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            cases.append(_case(record))
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"line {number} of {path} is not a valid case: {error!r}") from None
    return cases


def _case(record: dict[str, Any]) -> Case:
    task, messages, answer = record["task"], record["messages"], record["answer"]
    calls = [Call(call["name"], call["arguments"]) for call in record.get("calls", ())]
    tools = record.get("tools")
    for tool in tools or ():
        tool["function"]["name"]  # raises if it is not a tool
    return Case(task, messages, answer, tools, calls)


def content_and_calls(text: str, parser: AnswerParser) -> tuple[str, list[Call]]:
    """Return the content and the tool calls of a whole answer."""
    content, name = "", ""
    arguments: list[str] = []
    calls: list[Call] = []
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case ContentDelta(text=piece):
                content += piece
            case CallBegin(name=name):
                arguments = []
            case ArgumentsDelta(text=piece):
                arguments.append(piece)
            case CallEnd(is_complete=True):
                calls.append(Call(name, json.loads("".join(arguments))))
    return content, calls


def select(cases: Iterable[Case], tasks: list[str], limit: int) -> list[Case]:
    """Return the cases of `tasks` (all if empty), at most `limit` of each (0: no limit).

    Raises:
        ModelError: a task is unknown, or no case is left.
    """
    by_task: dict[str, list[Case]] = {}
    for case in cases:
        by_task.setdefault(case.task, []).append(case)
    unknown = [task for task in tasks if task not in by_task]
    if unknown or not by_task:
        known = ", ".join(by_task) or "none"
        raise ModelError(f"no cases for {', '.join(unknown) or 'any task'}; tasks in {EVAL_FILE}: {known}")
    return [case for task in by_task if not tasks or task in tasks for case in by_task[task][: limit or None]]


def run_cases(engine: EngineConfig, cases: list[Case]) -> EvaluationReport:
    """Answer all cases greedily in one batch and score them.

    Raises:
        ModelError: cases have tools, but the model's format of tool calls is unknown.
    """
    with ready_llm(engine) as llm:
        tokenizer = llm.get_tokenizer()
        call_format = None
        if any(case.tools is not None for case in cases):
            call_format = _call_format(tokenizer.chat_template_source)
        sampling = SamplingParams(temperature=0.0, max_tokens=_longest_answer(tokenizer, cases))
        started = time.perf_counter()
        outputs = llm.chat(
            [case.messages for case in cases],
            sampling,
            tools=[case.tools for case in cases],
            marks=() if call_format is None else call_format.marks,
            progress=stderr_is_terminal(),
        )
        seconds = time.perf_counter() - started
    return scored(cases, outputs, seconds, call_format)


def _longest_answer(tokenizer: Tokenizer, cases: Iterable[Case]) -> int:
    """Return how many tokens the longest answer may have."""

    def length(case: Case) -> int:
        calls = [json.dumps(dataclasses.asdict(call), ensure_ascii=False) for call in case.calls]
        texts = [case.answer, *calls]
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) + SPARE_TOKENS for text in texts)

    return max(map(length, cases))


def _call_format(template: str | None) -> ToolCallFormat:
    name = None if template is None else format_of_template(template)
    if name is None:
        raise ModelError(
            "the format in which the model calls tools is not known from its chat template; choose tasks "
            "without tools (--task)"
        )
    return FORMATS[name]


def scored(
    cases: list[Case],
    outputs: list[RequestOutput],
    seconds: float,
    call_format: ToolCallFormat | None = None,
) -> EvaluationReport:
    """Compare the outputs with the correct answers; `call_format` is that of the model's calls."""
    tasks: dict[str, Score] = {}
    total = Score()
    for case, output in zip(cases, outputs, strict=True):
        is_match = case.is_answered_by(output.outputs[0].text, call_format)
        for score in (tasks.setdefault(case.task, Score()), total):
            score.add(output, is_match=is_match)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return EvaluationReport(tasks=tasks, total=total, output_tokens=output_tokens, seconds=seconds)


def report_table(model: str, report: EvaluationReport) -> Table:
    """Return a table with a row per task and a total."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"Exact match of {model}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("task")
    for column in ("prompts", "exact match", "mean prompt tokens", "prefix-cache hits"):
        table.add_column(column, justify="right")
    for name, score in [*report.tasks.items(), ("all", report.total)]:
        if score is report.total:
            table.add_section()
        values = score.as_dict()
        table.add_row(
            name,
            f"{score.prompts:,}",
            f"{values['exact_match']:.1%}",
            f"{values['mean_prompt_tokens']:,.0f}",
            f"{values['prefix_cache_hit_share']:.1%}",
        )
    speed = report.as_dict()
    table.caption = (
        f"{report.seconds:.1f} s: {speed['prompt_tokens_per_second']:,.0f} prompt and "
        f"{speed['output_tokens_per_second']:,.0f} output tokens/s"
    )
    table.caption_justify = "left"
    return table

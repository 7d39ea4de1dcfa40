"""`quire generate` over an engine that repeats its prompts."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from fake_engine import FakeAsyncLLM, finished_output, install_fake_async_llm
from typer.testing import CliRunner, Result

from quire.cli.commands.answers import JsonAnswerWriter, OrderedStreams, TextAnswerWriter, output_record
from quire.cli.main import app
from quire.cli.prompts import InputPrompt, parse_lines
from quire.errors import EngineDeadError, InvalidRequestError
from quire.request_output import Logprob


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeAsyncLLM]:
    return install_fake_async_llm(monkeypatch)


def generate(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def test_one_prompt_is_answered_as_plain_text(engine: type[FakeAsyncLLM]):
    result = generate("hello there")
    assert (result.exit_code, result.stdout) == (0, "HELLO THERE\n")
    assert engine.instances[0].seen[0][0] == [{"role": "user", "content": "hello there"}]
    assert engine.instances[0].is_shut_down


def test_raw_leaves_out_the_chat_template(engine: type[FakeAsyncLLM]):
    assert generate("hello there", "--raw").stdout == "hello there\n"
    assert engine.instances[0].seen[0][0] == "hello there"


def test_a_model_without_a_chat_template_gets_the_text(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fake_engine.FakeTokenizer.has_chat_template", False)
    assert generate("hello there").stdout == "hello there\n"


def test_it_is_greedy_unless_told(engine: type[FakeAsyncLLM]):
    generate("a")
    generate("a", "--temperature", "0.5", "--max-tokens", "3", "--model", "other")
    greedy, sampled = engine.instances
    assert greedy.seen[0][1].temperature == 0
    assert (sampled.seen[0][1].temperature, sampled.seen[0][1].max_tokens) == (0.5, 3)
    assert sampled.config.model == "other"


def test_several_prompts_are_answered_in_order():
    assert generate("one two", "three").stdout == "> one two\nONE TWO\n\n> three\nTHREE\n"


def test_several_completions_are_labelled():
    assert generate("one two", "-n", "2").stdout == "[0] ONE TWO\n[1] ONE TWO\n"


def test_prompts_from_a_pipe_one_per_line():
    assert generate(stdin="one\n\ntwo\n").stdout == "> one\nONE\n\n> two\nTWO\n"


def test_prompts_from_a_file_and_answers_to_a_file(tmp_path: Path, engine: type[FakeAsyncLLM]):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "b c"}]
    source.write_text('{"prompt": "a"}\n' + json.dumps({"messages": chat}) + "\nplain\n")
    result = generate("first", "--input", str(source), "--output", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["outputs"][0]["text"] for record in records] == ["FIRST", "A", "B C", "PLAIN"]
    assert records[2]["messages"] == chat
    assert records[2]["outputs"][0] == {
        "text": "B C",
        "num_tokens": 2,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert engine.instances[0].seen[2][0] == chat


def test_json_lines_to_standard_output():
    records = [json.loads(line) for line in generate("a", "b", "-o", "-").stdout.splitlines()]
    assert [(record["prompt"], record["num_prompt_tokens"]) for record in records] == [("a", 4), ("b", 4)]


def test_a_refused_prompt_does_not_stop_the_others():
    result = generate("a", "refuse", "b")
    assert result.exit_code == 1
    assert "> a\nA\n" in result.stdout
    assert result.stdout.endswith("> b\nB\n")
    assert result.stderr == "error: prompt 2: prompt has 9 tokens; the limit is 8\n"


def test_a_lone_refused_prompt_leaves_standard_output_empty():
    result = generate("refuse")
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_refused_prompt_has_its_line_of_json():
    result = generate("a", "refuse", "-o", "-")
    assert result.exit_code == 1
    assert "9 tokens" in json.loads(result.stdout.splitlines()[1])["error"]


def test_a_dead_engine_ends_the_command_with_one_line(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    async def die(self, on_progress=None):
        raise EngineDeadError("the engine process ended with code 9")

    monkeypatch.setattr(engine, "wait_until_ready", die)
    result = generate("a")
    assert (result.exit_code, result.stderr) == (1, "error: the engine process ended with code 9\n")
    assert engine.instances[0].is_shut_down


def test_an_answer_that_the_engines_death_cuts_ends_its_line(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    answer = FakeAsyncLLM.answer

    async def die(self, text, params):
        async for output in answer(self, text, params):
            yield output
            raise EngineDeadError("the engine process ended with code 9")

    monkeypatch.setattr(FakeAsyncLLM, "answer", die)
    result = generate("one two", "three")
    assert (result.exit_code, result.stdout) == (1, "> one two\nONE\n")
    assert result.stderr == "error: the engine process ended with code 9\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line():
    result = generate("a", "--output", "/dev/full")
    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device\n"


def test_messages_of_single_prompts_speak_of_flags(monkeypatch: pytest.MonkeyPatch):
    async def refuse(self, text, params):
        raise InvalidRequestError("max_tokens is 9; the limit is max_model_len 8", param="max_tokens")
        yield

    monkeypatch.setattr(FakeAsyncLLM, "answer", refuse)
    assert generate("a").stderr == "error: --max-tokens is 9; the limit is --max-model-len 8\n"


def test_ctrl_c_stops_the_engine(engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch):
    async def interrupted(self, on_progress=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "wait_until_ready", interrupted)
    assert generate("a").exit_code == 130
    assert engine.instances[0].is_shut_down


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], "", "error: no prompt;"),
        ([], "\n \n", "error: no prompt;"),
        (["--input", "/no/such/file"], "", "error: cannot read --input /no/such/file"),
        (["a", "--output", "/no/such/folder/file"], "", "error: cannot write --output"),
        ([], "{bad\n", "error: line 1 of standard input is not valid JSON"),
        ([], 'ok\n{"text": "a"}\n', "error: line 2 of standard input must have either a prompt"),
    ],
)
def test_unusable_input_is_one_line(arguments: list[str], stdin: str, message: str):
    result = generate(*arguments, stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_what_is_not_utf8_is_refused_with_its_source(tmp_path: Path):
    source = tmp_path / "prompts"
    source.write_bytes(b"fine\n\xff\n")
    for result, name in (
        (generate("-i", str(source)), f"--input {source}"),
        (generate(stdin=b"\xff"), "standard input"),
    ):
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {name} is not UTF-8: ")


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path):
    prompts = b'\xef\xbb\xbf{"prompt": "a b"}\n'
    source = tmp_path / "prompts"
    source.write_bytes(prompts)
    assert generate("-i", str(source)).stdout == generate(stdin=prompts).stdout == "A B\n"


def test_lines_keep_their_text():
    assert parse_lines(["  two words \n", "\n", '{"prompt": "a\\nb"}\n'], "x") == [
        InputPrompt("  two words "),
        InputPrompt("a\nb"),
    ]
    with pytest.raises(InvalidRequestError, match="line 1 of x"):
        parse_lines(['{"messages": "hello"}'], "x")


def test_texts_that_grow_together_are_written_one_after_the_other():
    stream = io.StringIO()
    lanes = OrderedStreams(stream, ["a: ", "b: ", "c: "])
    lanes.update(1, "second", finished=True)
    lanes.update(2, "thi", finished=False)
    assert stream.getvalue() == ""
    lanes.update(0, "fir", finished=False)
    assert stream.getvalue() == "a: fir"
    lanes.update(0, "first", finished=True)
    assert stream.getvalue() == "a: first\nb: second\nc: thi"
    lanes.update(2, "third", finished=False)
    lanes.finish(2)
    assert stream.getvalue() == "a: first\nb: second\nc: third\n"


def test_text_is_flushed_as_it_comes():
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()
    answers = TextAnswerWriter(stream, [InputPrompt("a")], completions=1)
    for text in ("on", "one", "one two"):
        output = finished_output(text)
        output.finished, output.outputs[0].finish_reason = False, None
        answers.update(0, output)
        assert stream.flushed == text


def test_logprobs_are_in_the_json():
    output = finished_output("a")
    output.outputs[0].logprobs = [{7: Logprob(-2.0, 2, "b"), 5: Logprob(-0.5, 1, "a")}]
    output.prompt_logprobs = [None, {3: Logprob(-1.0, 1, "p")}]
    record = output_record(output)
    assert [entry["token_id"] for entry in record["outputs"][0]["logprobs"][0]] == [5, 7]
    assert record["prompt_logprobs"][0] is None
    stream = io.StringIO()
    JsonAnswerWriter(stream, [InputPrompt("p")]).update(0, output)
    assert json.loads(stream.getvalue())["prompt_logprobs"][1][0]["token"] == "p"


def test_no_more_requests_are_in_the_engine_than_it_can_use(
    engine: type[FakeAsyncLLM], monkeypatch: pytest.MonkeyPatch
):
    inside = peak = 0
    answer = FakeAsyncLLM.answer

    async def counted(self, text, params):
        nonlocal inside, peak
        inside += 1
        peak = max(peak, inside)
        await asyncio.sleep(0)
        async for output in answer(self, text, params):
            yield output
        inside -= 1

    monkeypatch.setattr(FakeAsyncLLM, "answer", counted)
    assert generate("--max-num-seqs", "2", stdin="word\n" * 20).exit_code == 0
    assert peak == 4

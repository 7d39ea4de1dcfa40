"""Every example runs as its first lines say, and what it prints is true."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import subprocesses
from quire import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *, preload: bool = True) -> list[str]:
    """Run an example as a user would, and return the lines that it prints."""
    result = subprocesses.run([sys.executable, str(EXAMPLES / f"{name}.py")], preload=preload)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.representative
def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for example in EXAMPLES.glob("*.py"):
        assert f'run("{example.stem}"' in source, f"{example.name} has no test"


def test_offline_batch_answers_each_question_below_it() -> None:
    lines = run("offline_batch", preload=False)
    assert lines[0::2] == [
        "What is a KV block?", "What is continuous batching?", "What is 27 + 58?", "What is 31 + 16?",
    ]  # fmt: skip
    assert "KV cache" in lines[1]
    assert lines[5:8:2] == ["  85", "  47"]


def test_streaming_chat_interleaves_two_conversations() -> None:
    lines = run("streaming_chat")
    pieces = [re.fullmatch(r"(Ada|Bob): '(.+)'", line).groups() for line in lines]
    answers = {name: "".join(piece for who, piece in pieces if who == name) for name in ("Ada", "Bob")}
    assert "KV cache" in answers["Ada"]
    assert answers["Ada"].endswith("85")
    assert "requests join and leave the batch" in answers["Bob"]
    speakers = [name for name, _ in pieces]
    assert speakers != sorted(speakers), "one conversation waited for the other"


def test_structured_output_keeps_to_each_constraint() -> None:
    number, choice, document = run("structured_output")
    assert number == "number: 85"
    assert choice in ("choice: yes", "choice: no")
    assert re.fullmatch(r'document: \{"sum": \d{1,3}, "even": (true|false)\}', document)


def test_a_program_for_openvino_genai_shows_what_it_says() -> None:
    block, total, at_most, sentence, document, held, same = run("openvino_genai")
    assert re.fullmatch(r"What is a KV block\? .*KV cache.*", block)
    assert total == "What is 27 + 58? 85"
    assert at_most == "at most 2 requests at a time"
    text, num_pieces = re.fullmatch(r"(.+\.) \(STOP, (\d+) pieces\)", sentence).groups()
    assert "requests join and leave the batch" in text
    assert int(num_pieces) > 1
    assert re.fullmatch(r'\{"sum": \d{1,3}, "even": (true|false)\}', document)
    found = re.fullmatch(r"(\d+) tokens in at most (\d+) blocks of 16", held)
    num_tokens, num_blocks = map(int, found.groups())
    assert num_tokens > 300
    assert num_blocks <= 128 // 16 + 1
    assert same == "the same answer with prompt lookup: True"


@pytest.mark.representative
def test_custom_scheduler_answers() -> None:
    assert run("custom_scheduler") == ["What is 27 + 58? 85", "What is 31 + 16? 47"]


def test_custom_policy_serves_short_prompts_first() -> None:
    lengths = [int(line.removesuffix(" prompt tokens")) for line in run("custom_policy")]
    assert len(lengths) == 4
    assert max(lengths[:2]) < min(lengths[2:])


def test_custom_connector_loads_what_another_engine_computed() -> None:
    first, answer, second, same_answer = run("custom_connector")
    assert first.startswith("first engine: loaded 0 of ")
    num_loaded = re.match(r"second engine: loaded (\d+) of ", second)
    assert int(num_loaded[1]) > 0
    assert "KV cache" in answer
    assert same_answer == answer


@pytest.fixture(scope="module")
def greedy_answers():
    """Return a function from questions to the tokens of their answers."""
    with LLM("mini", num_kv_blocks=64, num_threads=1) as llm:

        def answers(questions: list[str]) -> list[list[int]]:
            chats = [[{"role": "user", "content": question}] for question in questions]
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))
            return [list(output.outputs[0].token_ids) for output in outputs]

        yield answers


def test_prefill_decode_slots_answers_as_the_engine_does_and_reuses_slots(greedy_answers) -> None:
    lines = run("prefill_decode_slots")
    slots, questions = zip(*(line.split(": ", 1) for line in lines[0::3]), strict=True)
    assert [ast.literal_eval(tokens.strip()) for tokens in lines[2::3]] == greedy_answers(questions)
    assert slots == ("slot 1", "slot 1", "slot 1", "slot 0")


def test_prefill_decode_blocks_answers_as_the_engine_does_and_reuses_blocks(greedy_answers) -> None:
    lines = run("prefill_decode_blocks")
    blocks, questions = zip(*(line.split(": ", 1) for line in lines[0::3]), strict=True)
    assert [ast.literal_eval(tokens.strip()) for tokens in lines[2::3]] == greedy_answers(questions)
    tables = [set(ast.literal_eval(one.removeprefix("blocks "))) for one in blocks]
    assert len(tables) == 4
    assert sum(map(len, tables)) > len(set.union(*tables)), "no block was used twice"

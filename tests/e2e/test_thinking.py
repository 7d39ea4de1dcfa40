"""Reasoning with a budget, and grammars after them, through the whole engine with the built-in model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import quire
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.dialogue.reasoning.formats import REASONING_FORMATS
from quire.front.text.reasoning import ReasoningControl

pytestmark = pytest.mark.usefixtures("preloaded_engines")

MINI = Path(quire.__file__).parent / "mini"
QUESTIONS = ["What is a KV cache?", "Count to three.", "Who are you?"]
BUDGETS = [5, 0, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The built-in model with a template that opens reasoning."""
    path = tmp_path_factory.mktemp("thinking") / "mini"
    shutil.copytree(MINI, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    template = settings["chat_template"].rstrip() + "{% if add_generation_prompt %}<think>\n{% endif %}"
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return path


def answers(model, *, together, **options):
    structure = StructuredOutputsParams(regex="(yes|no){2,9}")
    texts = []
    with LLM(str(model), num_threads=1, num_kv_blocks=128, **options) as llm:
        requests = [
            ([{"role": "user", "content": question}], budget)
            for question, budget in zip(QUESTIONS, BUDGETS, strict=True)
        ]
        params = [
            SamplingParams(max_tokens=80, seed=1, n=2, structured_outputs=structure),
            SamplingParams(max_tokens=30, temperature=0),
            SamplingParams(max_tokens=80, seed=2, structured_outputs=structure),
        ]
        for (messages, budget), one in zip(requests, params, strict=True):
            control = ReasoningControl(REASONING_FORMATS["think"], budget, " Enough.")
            batch = [messages] * 3 if together else [messages]
            outputs = llm.chat(batch, one, reasoning=control)
            assert len({tuple(tuple(each.token_ids) for each in output.outputs) for output in outputs}) == 1
            texts.append([(each.text, list(each.token_ids)) for each in outputs[0].outputs])
    return texts


@pytest.mark.histories
def test_the_same_answers_alone_together_and_with_drafts(model):
    alone = answers(model, together=False)
    for texts, budget in zip(alone, BUDGETS, strict=True):
        for text, token_ids in texts:
            reasoning, _, after = text.partition(" Enough.\n</think>\n\n")
            assert after
            assert len(token_ids) > budget
            assert reasoning or not budget
    for text, _ in alone[0] + alone[2]:
        assert set(text.partition("</think>\n\n")[2].replace("yes", "").replace("no", "")) == set()
    assert answers(model, together=True, max_num_batched_tokens=16) == alone
    assert answers(model, together=False, overlap_steps=True) == alone
    assert answers(model, together=True, speculative_method="ngram", ngram_min=1) == alone


def test_stop_strings_count_after_the_reasoning(model):
    control = ReasoningControl(REASONING_FORMATS["think"], 0, " Enough.")
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    with LLM(str(model), num_threads=1, num_kv_blocks=64) as llm:
        free, stopped = (
            llm.chat(messages, SamplingParams(max_tokens=30, temperature=0, stop=stop), reasoning=control)[0]
            for stop in ((), ("e", "\n"))
        )
    reasoning, mark, after = free.outputs[0].text.partition("</think>\n\n")
    assert "Enough" in reasoning
    assert "e" in after
    assert stopped.outputs[0].text == reasoning + mark + re.split("[e\n]", after)[0]

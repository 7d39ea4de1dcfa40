"""Grammars that are tried out in a process of their own, which may die of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from test_llguidance_backend import BACKEND, TOKENIZER

from quire.errors import InvalidRequestError
from quire.grammar import trials
from quire.grammar.interface import SlowGrammarError
from quire.grammar.trials import TriedGrammars
from quire.structured_outputs import StructuredOutputsParams
from subprocesses import run

pytestmark = [pytest.mark.usefixtures("preloaded_engines"), pytest.mark.processes]

PATTERNS = [{"type": "string", "pattern": f"^.*{'ab' * count}.*$"} for count in range(60)]
BOMB = StructuredOutputsParams(json=json.dumps({"allOf": PATTERNS}))  # takes minutes and gigabytes


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(trials, "QUICK_CPU_SECONDS", 0.3)  # on a busy machine, 0.03 can be too few
    grammars = TriedGrammars(BACKEND, cpu_seconds=0.4)
    yield grammars
    grammars.close()
    assert not processes_of(grammars)


def processes_of(grammars: TriedGrammars) -> set[subprocess.Popen]:
    return grammars._all


def follows(grammars: TriedGrammars, regex: str, text: str) -> bool:
    grammar = grammars.compile(StructuredOutputsParams(regex=regex))
    return grammar.accept(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.representative
def test_what_is_compiled_is_what_was_asked_for(tried):
    assert follows(tried, "[a-c]+", "abc")
    assert not follows(tried, "[a-c]+", "abd")


@pytest.mark.representative
def test_grammars_have_sizes(tried):
    small, large = (
        tried.compile(StructuredOutputsParams(choice=[f"word {number}" for number in range(count)]))
        for count in (1, 500)
    )
    assert 0 < small.num_bytes < large.num_bytes < 2**26
    assert large.copy().num_bytes == large.num_bytes


@pytest.mark.representative
def test_what_is_wrong_is_said_as_without_a_trial(tried):
    with pytest.raises(InvalidRequestError) as directly:
        BACKEND.compile(StructuredOutputsParams(regex="a("))
    with pytest.raises(InvalidRequestError) as tried_out:
        tried.compile(StructuredOutputsParams(regex="a("))
    assert str(tried_out.value) == str(directly.value)


def test_a_grammar_that_takes_too_much_is_refused_and_the_next_one_compiled(tried):
    with pytest.raises(SlowGrammarError):
        tried.compile(BOMB)
    with pytest.raises(InvalidRequestError, match=r"took more than .*make it simpler"):
        tried.compile_slowly(BOMB)
    [process] = processes_of(tried)
    assert follows(tried, "[a-c]+", "abc")
    assert processes_of(tried) == {process}


def test_a_process_that_has_died_is_the_error_of_one_request(tried):
    assert follows(tried, "[a-c]+", "abc")
    [process] = processes_of(tried)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        tried.compile(StructuredOutputsParams(regex="a"))
    assert follows(tried, "[a-c]+", "abc")


FAULTS = {
    "dies": ("import os; input(); os.abort()", "has ended"),
    "raises": ("raise ValueError", "(has ended|Broken pipe)"),
    "lies": ("input(); print('{', flush=True); input()", "truncated"),
    "lies about the size": ("input(); print('{\"num_bytes\": []}', flush=True); input()", "Expected"),
    "lies about types": ("input(); print('3', flush=True); input()", "Expected"),
    "never ends to speak": ("while True: print('x' * 9999, end='')", "has not answered"),
    "hangs": ("input(); input()", "has not answered for 0.2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", ["compile", "compile_slowly"])
def test_processes_with_faults_are_the_error_of_one_request(tried, fault, call, monkeypatch):
    code, message = FAULTS[fault]
    popen = trials.subprocess.Popen
    with monkeypatch.context() as patched:
        patched.setattr(trials, "ANSWER_SECONDS", 0.2 if message.startswith("has not") else 60)
        patched.setattr(
            trials.subprocess, "Popen", lambda command, **options: popen([command[0], "-c", code], **options)
        )
        with pytest.raises(InvalidRequestError, match=f"cannot be used: .*{message}"):
            getattr(tried, call)(StructuredOutputsParams(regex="a"))
    assert not processes_of(tried)
    assert follows(tried, "[a-c]+", "abc")


@pytest.mark.representative
def test_without_descriptors_one_request_fails(tried, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(trials.subprocess, "Popen", refuse)
        with pytest.raises(InvalidRequestError, match="Too many open files"):
            tried.compile(StructuredOutputsParams(regex="a"))
    assert follows(tried, "[a-c]+", "abc")


@pytest.mark.representative
def test_a_trial_process_shares_the_session_so_that_its_priority_counts(tried):
    tried.compile(StructuredOutputsParams(regex="a"))
    [process] = processes_of(tried)
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it


def test_a_process_whose_engine_dies_at_once_ends_without_an_error():
    command = [sys.executable, "-m", "quire.grammar.trial_process"]
    assert run(command, stdin='{"tokenizer"', preload=True).returncode == 0

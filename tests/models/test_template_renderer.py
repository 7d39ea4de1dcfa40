"""Chat templates that never end, or take all memory, end one conversation only; so do faulty processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from descriptors import num_open, wait_until_closed
from quire.config import ChatTemplateConfig
from quire.errors import InvalidRequestError, QueueFullError, RequestTimeoutError
from quire.models.text import template_renderer
from quire.models.text.template_renderer import TemplateRenderer

pytestmark = pytest.mark.usefixtures("preloaded_engines")

# The first message says what is done: a template that is fine for most conversations.
TEMPLATE = """
{%- set do = messages[0].content -%}
{%- set ten = 9 + messages[:1] | length -%}
{%- macro recurse(n) %}{{ recurse(n + 1) }}{{ recurse(n + 1) }}{% endmacro -%}
{%- macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro -%}
{%- if do == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif do == 'nested' %}{% for a in messages %}{% for b in messages %}{% for c in messages %}
{%- endfor %}{% endfor %}{% endfor %}
{%- elif do == 'calls' %}{{ twice(60) }}
{%- elif do == 'deep' %}{{ recurse(0) }}
{%- elif do == 'double' %}{% set ns = namespace(t='a') %}{% for a in range(60) %}{% set ns.t = ns.t ~ ns.t %}
{%- endfor %}{{ ns.t | length }}
{%- elif do == 'tree' %}{% set ns = namespace(t=[1]) %}{% for a in range(60) %}{% set ns.t = [ns.t, ns.t] %}
{%- endfor %}{{ ns.t | tojson }}
{%- elif do == 'times' %}{{ 'a' * ten ** 12 }}
{%- elif do == 'power' %}{{ ten ** (ten ** ten) }}
{%- elif do == 'center' %}{{ 'a' | center(ten ** 11) }}
{%- elif do == 'format' %}{{ '%100000000000d' % ten }}
{%- elif do == 'long' %}{{ 'a' * 20 * ten ** 6 }}
{%- else %}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"""
BOMBS = {
    "loop": "computing time",
    "nested": "computing time",
    "calls": "computing time",
    "deep": "recursion",
    "double": "memory",
    "tree": "memory|computing time",
    "times": "memory",
    "power": "computing time",
    "center": "memory",
    "format": "memory",
    "long": "text has 20000014 bytes",
}


def renderer_of(source: str, **limits: Any) -> TemplateRenderer:
    limits = {"chat_template_timeout": 0.2, "chat_template_memory": 64, **limits}
    return TemplateRenderer(source, {"bos_token": "<s>"}, ChatTemplateConfig(**limits))


def rendered(renderer: TemplateRenderer, *contents: Any) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return renderer.render(messages, add_generation_prompt=True).text


@pytest.fixture(scope="module")
def shared():
    renderer = renderer_of(TEMPLATE)
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def patient():
    """Has time for what takes all memory, however busy the machine is."""
    renderer = renderer_of(TEMPLATE, chat_template_timeout=10)
    yield renderer
    renderer.close()


@pytest.fixture
def renderer():
    renderer = renderer_of(TEMPLATE)
    yield renderer
    renderer.close()


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.processes
@pytest.mark.first_case
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_conversation_that_takes_too_much_is_refused_and_the_next_one_is_not(shared, patient, bomb):
    renderer = shared if "computing time" in BOMBS[bomb] else patient
    contents = [bomb] + ["a"] * (2000 * (bomb == "nested"))
    with pytest.raises(InvalidRequestError, match=BOMBS[bomb]) as caught:
        rendered(renderer, *contents)
    assert caught.value.param == "messages"
    assert rendered(renderer, "Hi", "you") == "<s>Hiyou"


@pytest.mark.parametrize(
    ("bomb", "knob"), [("loop", "chat_template_timeout"), ("times", "chat_template_memory")]
)
def test_the_error_names_the_limit(shared, bomb, knob):
    with pytest.raises(InvalidRequestError, match=knob):
        rendered(shared, bomb)


def test_a_limit_can_be_raised():
    source = "{% set n = 10 ** 8 %}{{ ('a' * n) | length }}"
    renderer = renderer_of(source, chat_template_memory=256, chat_template_timeout=120.0)
    assert rendered(renderer, "") == "100000000"
    renderer.close()


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ 7 ** (7 ** 10) }}"],
    ids=["syntax", "nesting", "constants"],
)
def test_a_template_that_cannot_be_compiled_is_tried_once(source, monkeypatch):
    renderer = renderer_of(source)
    with pytest.raises(InvalidRequestError) as first:
        rendered(renderer, "Hi")
    monkeypatch.setattr(template_renderer, "_Process", None)
    with pytest.raises(InvalidRequestError) as second:
        rendered(renderer, "Hi")
    assert str(second.value) == str(first.value)


def test_refused_messages_do_not_end_the_process():
    before = processes()
    renderer = renderer_of("{{ raise_exception('no') if messages[0].content == 'x' else 'yes' }}")
    assert rendered(renderer, "y") == "yes"
    started = processes() - before
    with pytest.raises(InvalidRequestError, match="no"):
        rendered(renderer, "x")
    assert rendered(renderer, "y") == "yes"
    assert processes() - before == started
    renderer.close()


def test_any_text_arrives(renderer):
    text = 'é\u2028\x00\ud800"\\\n漢🙂'
    assert rendered(renderer, text) == f"<s>{text}"
    assert rendered(renderer, "a" * 5_000_000) == "<s>" + "a" * 5_000_000


@pytest.mark.parametrize("content", [object(), {1, 2}, b"bytes"])
def test_messages_are_plain_data(renderer, content):
    with pytest.raises(InvalidRequestError, match="messages must be made of") as caught:
        rendered(renderer, content)
    assert caught.value.param == "messages"


def test_the_process_shares_the_session_so_that_its_priority_counts(renderer):
    before = processes()
    rendered(renderer, "Hi")
    [started] = processes() - before
    assert os.getsid(started) == os.getsid(0)
    assert os.getpgid(started) == started  # Ctrl-C does not reach it


def test_a_process_that_dies_while_idle_is_replaced(renderer):
    before = processes()
    rendered(renderer, "Hi")
    [started] = processes() - before
    os.kill(started, signal.SIGKILL)
    os.waitid(os.P_PID, started, os.WEXITED | os.WNOWAIT)
    assert rendered(renderer, "Hi") == "<s>Hi"


FAULTS = {
    "dies": (["-c", "input()"], InvalidRequestError, "ended its process"),
    "raises": (["-c", "raise ValueError"], InvalidRequestError, "ended its process"),
    "aborts": (["-c", "import os; input(); os.abort()"], InvalidRequestError, "exit code -6"),
    "is killed": (["-c", "import os; input(); os.kill(os.getpid(), 9)"], QueueFullError, "killed by SIGKILL"),
    "lies": (["-c", "import time; print('{', flush=True); time.sleep(99)"], InvalidRequestError, "cannot be"),
    "lies about types": (["-c", "print(3)"], InvalidRequestError, "cannot be used"),
    "never ends to speak": (
        ["-c", "while True: print('x' * 9999, end='')"],
        InvalidRequestError,
        "cannot be",
    ),
    "hangs": (["-c", "import time; time.sleep(99)"], RequestTimeoutError, "not rendered within 0.5 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_processes_with_faults(renderer, fault, monkeypatch):
    arguments, error, message = FAULTS[fault]
    before = processes()
    popen = template_renderer.subprocess.Popen
    with monkeypatch.context() as patched:
        patched.setattr(template_renderer, "WALL_SECONDS", 0.5 if fault == "hangs" else 60)
        patched.setattr(template_renderer, "END_SECONDS", 0.1)
        patched.setattr(
            template_renderer.subprocess,
            "Popen",
            lambda command, **options: popen([command[0], *arguments], **options),
        )
        with pytest.raises(error, match=message):
            rendered(renderer, "Hi")
    assert processes() == before


def test_a_kill_before_the_template_has_been_compiled_is_not_held_against_it(renderer, monkeypatch):
    popen = template_renderer.subprocess.Popen

    def killed(*arguments, **options):
        process = popen(*arguments, **options)
        process.kill()
        return process

    with monkeypatch.context() as patched:
        patched.setattr(template_renderer.subprocess, "Popen", killed)
        with pytest.raises(QueueFullError, match="killed by SIGKILL"):
            rendered(renderer, "Hi")
    assert rendered(renderer, "Hi") == "<s>Hi"


def test_a_machine_without_descriptors_is_busy(renderer, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(template_renderer.subprocess, "Popen", refuse)
        with pytest.raises(QueueFullError, match="Too many open files"):
            rendered(renderer, "Hi")
    assert rendered(renderer, "Hi") == "<s>Hi"


def test_no_process_outlives_its_renderer():
    descriptors = num_open()
    before = processes()
    renderer = renderer_of(TEMPLATE)
    rendered(renderer, "Hi")
    assert processes() != before
    del renderer
    wait_until_closed(descriptors)
    assert processes() == before


@pytest.mark.parametrize("has_started", [False, True])
def test_a_process_whose_parent_ends_says_nothing(
    has_started: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends while the process starts, or before it has read an answer."""
    start = json.dumps(
        {"source": TEMPLATE, "special_tokens": {}, "memory_bytes": 1 << 30, "cpu_seconds": 60.0}
    ).encode()
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "quire.models.text.template_process"]
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
    with ours:
        if has_started:
            ours.sendall(start + b"\n")
            assert ours.recv(1, socket.MSG_PEEK)  # not read
    assert process.wait(60) == 0
    assert capfd.readouterr().err == ""

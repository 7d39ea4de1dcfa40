"""Content as texts and as lists of parts: templates get what they show."""

from __future__ import annotations

import pytest

from quire.config import ChatTemplateConfig
from quire.errors import InvalidRequestError
from quire.models.text.template_renderer import TemplateRenderer

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOP = "{% for c in m.content %}{{ c.text }}{% endfor %}"
BY_ROLE = "{% if m.role == 'ROLE' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}"
IN_MACRO = (
    "{% macro shown(x) %}{% for c in x | selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
)
ASKED = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"
FIRST_ONLY = "{{ m.content if m.content is string else m.content[0].text }}"
REFUSES_LISTS = "{{ m.content if m.content is string else raise_exception('no list') }}"
REFUSES_TEXT = "{% if m.content is string %}{{ raise_exception('no text') }}{% endif %}" + LOOP


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [
        ("{{ m.content }}", "ab", "a\nb"),
        ("{{ m['content'] | trim }}", "ab", "a\nb"),
        ("{{ m.content | tojson }}", '"ab"', '"a\\nb"'),
        (LOOP, "ab", "ab"),
        (REFUSES_TEXT, "ab", "ab"),
        ("{% set n = namespace(c=m.content) %}{% for c in n.c %}{{ c['text'] }}.{% endfor %}", "ab.", "a.b."),
        (IN_MACRO + "{% endmacro %}{{ shown(m.content) }}", "ab", "ab"),
        (ASKED, "ab", "ab"),
        (FIRST_ONLY, "ab", "a\nb"),
        (REFUSES_LISTS, "ab", "a\nb"),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "ab", "a\nb"),
        (BY_ROLE.replace("ROLE", "user"), "ab", "ab"),
        (BY_ROLE.replace("ROLE", "system"), "ab", "a\nb"),
        ("{% if m.role != 'user' %}{{ raise_exception('who?') }}{% endif %}" + LOOP, "ab", "ab"),
        ("x", "x", "x"),
    ],
)  # fmt: skip
def test_a_template_gets_the_form_that_it_shows(source, of_text, of_parts):
    renderer = TemplateRenderer("{% for m in messages %}" + source + "{% endfor %}", {}, ChatTemplateConfig())
    try:
        for content, expected in (("ab", of_text), (PARTS, of_parts)):
            message = {"role": "user", "content": content}
            assert renderer.render([message], add_generation_prompt=False).text == expected
    finally:
        renderer.close()


def test_each_role_has_its_form():
    source = "{% for m in messages %}<{{ m.role }}>" + BY_ROLE.replace("ROLE", "tool") + "{% endfor %}"
    renderer = TemplateRenderer(source, {}, ChatTemplateConfig())
    messages = [{"role": role, "content": content} for role in ("user", "tool") for content in ("ab", PARTS)]
    messages.append({"role": "assistant", "content": None})
    try:
        shown = renderer.render(messages, add_generation_prompt=False).text
    finally:
        renderer.close()
    assert shown == "<user>ab<user>a\nb<tool>ab<tool>ab<assistant>None"


THINKING = (
    "{% if c.type == 'text' %}{{ c.text }}{% elif c.type == 'thinking' %}[THINK]{{ c.thinking }}[/THINK]"
    "{% else %}{{ raise_exception('what?') }}{% endif %}"
)
IN_PARTS = ASKED.replace("{{ c.text }}", THINKING)


@pytest.mark.parametrize(
    ("source", "before"),
    [
        (IN_PARTS, "[THINK]Hm.[/THINK]"),
        ("{% if m.thinking %}<{{ m.reasoning_content }}>{% endif %}" + ASKED, "<Hm.>"),
        ("{{ m.content if m.content is string else m.content | map('tojson') | join }}", ""),
        (ASKED, ""),
        ("{{ m.content }}", ""),
    ],
)
def test_reasoning_is_a_part_of_content_where_a_template_shows_it_so(source, before):
    calls = "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"
    source = "{% for m in messages %}" + source + calls + "{% endfor %}"
    renderer = TemplateRenderer(source, {}, ChatTemplateConfig())
    said = dict.fromkeys(("thinking", "reasoning_content"), "Hm.")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    try:
        for content, shown in (("ab", "ab"), (PARTS, None), ("", "")):
            message = {"role": "assistant", "content": content, "tool_calls": [call], **said}
            text = renderer.render([message], add_generation_prompt=False).text
            assert text.startswith(before)
            assert text.endswith("(f)")
            assert shown is None or text == f"{before}{shown}(f)"
        silent = [{"role": "assistant", "content": "ab"}]
        assert renderer.render(silent, add_generation_prompt=False).text == "ab"
    finally:
        renderer.close()


RESULTS = "{% for r in m.tool_responses %}<{{ r.name | default('unknown') }}:{{ r.response }}>{% endfor %}"
CALLS = "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CALLS + RESULTS + "{{ m.content }};", "Hi;(f)(g)<f:a\nb><unknown:c>;(f)<f:d>Hm;So;"),
        (CALLS + "{{ m.content }};", "Hi;(f)(g);a\nb;c;(f)Hm;d;So;"),
    ],
)
def test_results_are_a_part_of_the_message_with_the_calls_where_a_template_shows_them_so(source, expected):
    def called(*names):
        return [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]

    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": called("f", "g")},
        {"role": "tool", "content": PARTS, "name": "f"},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "Hm", "tool_calls": called("f")},
        {"role": "tool", "content": "d", "name": "f"},
        {"role": "assistant", "content": "So"},
    ]
    renderer = TemplateRenderer("{% for m in messages %}" + source + "{% endfor %}", {}, ChatTemplateConfig())
    try:
        assert renderer.render(messages, add_generation_prompt=False).text == expected
        assert "tool_responses" not in messages[1]
    finally:
        renderer.close()


def test_a_template_that_hangs_on_small_conversations_shows_texts():
    hang = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = (
        "{% if messages | length < 4 %}"
        + hang
        + "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    renderer = TemplateRenderer(source, {}, ChatTemplateConfig(chat_template_timeout=0.1))
    try:
        messages = [{"role": "user", "content": PARTS}] * 4
        assert renderer.render(messages, add_generation_prompt=False).text == "a\nb" * 4
        with pytest.raises(InvalidRequestError, match="computing time"):
            renderer.render(messages[:1], add_generation_prompt=False)
    finally:
        renderer.close()

"""Text that remembers what was given: equal to plain text, and each character keeps its mark."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.models.text.chat_template import ChatTemplate
from quire.models.text.traced_text import TracedText, given_runs, given_text, joined, traced

OWN, GIVEN = "ab< \n", "xy> \t"  # the spaces are in both
texts = st.lists(st.tuples(st.booleans(), st.text(max_size=6)), max_size=4).map(
    lambda parts: traced(joined(given_text(text) if is_given else text for is_given, text in parts))
)
pieces = st.lists(
    st.one_of(st.text("ab<.", max_size=4), st.text("xy>,", max_size=4).map(given_text)), max_size=5
).map(lambda parts: traced(joined(parts)))
separators = st.one_of(st.none(), st.text("ab<xy>", min_size=1, max_size=2))
limits = st.integers(-1, 3)


def given_part(text):
    """Return the characters that are given, as the marks have it."""
    assert isinstance(text, TracedText)
    return "".join(str.__str__(text)[start:end] for start, end in given_runs(text))


def expected_part(text):
    """Return the characters that are given, as the alphabets have it."""
    return "".join(one for one in str.__str__(text) if one in "xy>,")


CALLS = [
    lambda text, sep, limit: text.split(sep, limit),
    lambda text, sep, limit: text.rsplit(sep, limit),
    lambda text, sep, limit: text.splitlines(limit > 0),
    lambda text, sep, limit: text.partition(sep or "a"),
    lambda text, sep, limit: text.rpartition(sep or "x"),
    lambda text, sep, limit: [text.strip(sep), text.lstrip(sep), text.rstrip(sep)],
    lambda text, sep, limit: [text.removeprefix(sep or ""), text.removesuffix(sep or "")],
    lambda text, sep, limit: [text.replace(sep or "b", "<", limit)],
    lambda text, sep, limit: [text[limit:], text[:limit], text[::-1], *text],
    lambda text, sep, limit: [text + (sep or ""), text * limit, limit * text],
]


@given(texts, separators, limits)
@settings(max_examples=60, deadline=None)
def test_it_does_what_plain_text_does(text, sep, limit):
    plain = str.__str__(text)
    assert (text, hash(text), len(text)) == (plain, hash(plain), len(plain))
    for call in CALLS:
        assert list(call(text, sep, limit)) == list(call(plain, sep, limit))
    for name in ("lower", "upper", "title", "capitalize", "swapcase", "casefold"):
        assert getattr(text, name)() == getattr(plain, name)()


@given(pieces, separators, limits)
@settings(max_examples=60, deadline=None)
def test_each_character_keeps_its_mark(text, sep, limit):
    for call in CALLS:
        for part in call(text, sep, limit):
            if call is CALLS[-1] and sep:
                continue  # what is added is not given, whatever its letters
            assert given_part(part) == expected_part(part)
    assert given_part(traced(", ").join([text, "b", text])) == 2 * expected_part(text)
    assert given_part("a" + text + "b") == expected_part(text)


def marked(source, **variables):
    """Return what a template makes of variables, with what is given in brackets."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    chat = template.render([], add_generation_prompt=False, tools=None, variables=variables, traces=True)
    shown, at = [], 0
    for start, end in chat.given:
        shown += [chat.text[at:start], f"⟦{chat.text[start:end]}⟧"]
        at = end
    return "".join([*shown, chat.text[at:]])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<a>{{ x }}<b>", "<a>⟦hey⟧<b>"),
        ("{{ '<a>' + x + '<b>' }}", "<a>⟦hey⟧<b>"),
        ("{{ '<a>' ~ x ~ 5 ~ '<b>' }}", "<a>⟦hey⟧5<b>"),
        ("{{ '<a>%s<b>%d' % (x, 3) }}{{ '<%s>' % x }}", "<a>⟦hey⟧<b>3<⟦hey⟧>"),
        ("{{ '<a>{}<b>{y}'.format(x, y=x) }}", "<a>⟦hey⟧<b>⟦hey⟧"),
        ("{{ '<%s>%s' | format(x, 'a') }}", "<⟦hey⟧>a"),
        ("{{ ', '.join([x, 'a']) }}{{ ['<a>', x] | join('-') }}", "⟦hey⟧, a<a>-⟦hey⟧"),
        ("{{ 'e<a>' | replace('e', x) }}{{ x | replace('e', '<a>') }}", "⟦hey⟧<a>⟦h⟧<a>⟦y⟧"),
        ("{{ 'e<a>'.replace('e', x) }}", "⟦hey⟧<a>"),
        ("{{ x | upper ~ x | title ~ x | capitalize ~ x | length }}", "⟦HEYHeyHey⟧3"),
        ("{{ x | first ~ x | last ~ x | reverse ~ x[1:] ~ x[0] }}", "⟦hyyeheyh⟧"),
        ("{% for c in x %}{{ c }}.{% endfor %}{{ x | list | join('.') }}", "⟦h⟧.⟦e⟧.⟦y⟧.⟦h⟧.⟦e⟧.⟦y⟧"),
        ("{% set y %}<a>{{ x }}{% endset %}{{ y | trim }}", "<a>⟦hey⟧"),
        ("{% macro m(y) %}<a>{{ y }}{% endmacro %}{{ m(x) }}{{ m('z') | upper }}", "<a>⟦hey⟧<A>Z"),
        ("{% macro m() %}{{ caller(x) }}{% endmacro %}{% call(z) m() %}<c>{{ z }}{% endcall %}", "<c>⟦hey⟧"),
        ("{% filter upper %}<a>{{ x }}{% endfilter %}", "<A>⟦HEY⟧"),
        ("{% set n = namespace(t='<a>') %}{% set n.t = n.t + x %}{{ n.t }}", "<a>⟦hey⟧"),
        ("{{ d | tojson }}{{ {'a': '<a>'} | tojson(indent=1) | length }}", '⟦{"<k>": ["<v>"]}⟧15'),
        ("{{ d }}{{ [x] }}{{ x ~ [x] }}", "⟦{'<k>': ['<v>']}['hey']hey['hey']⟧"),
        ("{% for k, v in d | items %}<a>{{ k }}{{ v[0] }}{% endfor %}", "<a>⟦<k><v>⟧"),
        ("{% for k in d %}{{ k }}{% endfor %}{{ d.keys() | list | first }}", "⟦<k><k>⟧"),
        ("{{ d.get('no', '<a>') }}{{ no | default('<b>') }}{{ x | default('<b>') }}", "<a><b>⟦hey⟧"),
        ("{{ x.encode().decode() }}{{ x.center(5) }}{{ x.zfill(4) }}", "⟦hey hey 0hey⟧"),
        ("{{ x | string | safe ~ '<a>' | safe }}{{ x | e }}", "⟦hey⟧<a>⟦hey⟧"),
        ("{{ x if x == 'hey' and 'e' in x and x is string else '' }}{{ {'hey': '<a>'}[x] }}", "⟦hey⟧<a>"),
        ("{{ x | indent(2) }}{{ x | wordwrap(2) | length }}{{ x | map('upper') | join }}", "⟦hey⟧4⟦HEY⟧"),
        ("{{ 5 % 3 }}{{ 'a' * 2 }}{{ x * 2 }}{{ none }}{{ true }}{{ no }}", "2aa⟦heyhey⟧NoneTrue"),
        ("{{ bos_token }}{{ x.split('e')[1] + bos_token }}", "<s>⟦y⟧<s>"),
        ("{{ '%(a)s' % {'a': x} }}{{ '{0[0]}'.format([x]) }}", "⟦heyhey⟧"),
        ("{{ '%.2s|%5s' % (x, x) }}", "⟦he|  hey⟧"),
        ("{{ ('<a>' | safe) + x }}{{ x + ('<a>' | safe) }}", "<a>⟦heyhey⟧<a>"),
        ("{% autoescape true %}<a>{{ x }}{% endautoescape %}", "<a>⟦hey⟧"),
        ("{{ ('<a>\n' + x + '\n' + x) | indent(2, true) }}", "  <a>\n  ⟦hey⟧\n  ⟦hey⟧"),
        ("{{ (x + '\n\n' + x) | indent }}", "⟦hey⟧\n\n    ⟦hey⟧"),
        ("{{ '<a>'['format']() }}{{ x | attr('upper') is defined }}", "⟦<a>⟧True"),
    ],
)  # fmt: skip
def test_templates(source, expected):
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert marked(source, x="hey", d={"<k>": ["<v>"]}) == expected
    text = expected.replace("⟦", "").replace("⟧", "")
    shown = plain.from_string(source).render(x="hey", d={"<k>": ["<v>"]}, bos_token="<s>")
    if "tojson" not in source:
        assert text == shown


def test_what_a_client_sends_as_a_variable_is_given():
    assert marked("{{ bos_token }}", bos_token="<s>") == "⟦<s>⟧"


def test_roles_are_the_templates_and_others_are_not():
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{% endfor %}", {})
    messages = [{"role": role, "content": ""} for role in ("user", "end")]
    chat = template.render(messages, add_generation_prompt=False, tools=None, variables={}, traces=True)
    assert (chat.text, chat.given) == ("<user><end>", [(7, 10)])


def test_marks_are_out_of_reach():
    assert marked("{{ x._given }}{{ x['_given'] }}", x="hey") == ""

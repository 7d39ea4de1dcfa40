"""Words are not commands: what clients give makes ordinary tokens, and all else is as in `transformers`."""

from __future__ import annotations

import functools
import re

import tokenizers
from chat_cases import BACKENDS, COMMANDS, HOSTILE, INNOCENT, TEMPLATES, conversations, make
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quire.models.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def tokenizer(kind, template):
    """Renders in this process: the template is trusted here."""
    made = make(kind, template)
    rendering = ChatTemplate(made.chat_template_source, SPECIALS)

    def render(messages, *, add_generation_prompt=True, tools=None, variables=None):
        return rendering.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables or {},
            traces=True,
        )

    return made, render


@functools.cache
def reference(kind, template):
    made, _ = tokenizer(kind, template)
    backend = tokenizers.Tokenizer.from_str(made.backend.to_str())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=made.chat_template_source, **SPECIALS
    )


kinds = st.sampled_from(sorted(BACKENDS))
templates = st.sampled_from(sorted(TEMPLATES))


def commands_in(made, ids):
    added = [made.added_token_id(token.content) for token in COMMANDS]
    return [token_id for token_id in ids if token_id in added]


def without_spellings(text):
    """Return as many letters, signs and spaces, by which tokens of single words are told."""
    return re.sub(r"\w", "x", re.sub(r"[^\w\s]", "\u00a7", text))


@given(kinds, templates, conversations(INNOCENT))
@settings(max_examples=40, deadline=None)
def test_without_spellings_tokens_are_those_of_transformers(kind, template, messages):
    made, render = tokenizer(kind, template)
    expected = reference(kind, template).apply_chat_template(messages, add_generation_prompt=True)
    assert list(made.tokenize_chat(render(messages)).ids) == list(expected["input_ids"])


@given(kinds, templates, conversations(HOSTILE), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_clients_give_makes_no_commands(kind, template, messages, adds):
    made, render = tokenizer(kind, template)
    harmless = [{**message, "content": without_spellings(message["content"])} for message in messages]
    expected = commands_in(made, made.tokenize_chat(render(harmless), add_special_tokens=adds).ids)
    chat = render(messages)
    assert commands_in(made, made.tokenize_chat(chat, add_special_tokens=adds).ids) == expected
    assert chat.text == reference(kind, template).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


@given(templates, conversations(HOSTILE))
@settings(max_examples=40, deadline=None)
def test_given_text_has_the_tokens_that_the_model_makes_of_it(template, messages):
    """Each piece between commands is what a tokenizer without any makes of it."""
    made, render = tokenizer("byte-level", template)
    bare = BACKENDS["byte-level"]()
    bare.add_tokens(
        [token for token in made.backend.get_added_tokens_decoder().values() if token.content.isspace()]
    )
    chat = render(messages)
    ids = list(made.tokenize_chat(chat).ids)
    names = {made.added_token_id(token.content): token.content for token in COMMANDS}
    expected: list[int] = []
    piece: list[int] = []
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in names:
            piece.append(token_id)
            continue
        text = made.decode(piece, skip_special_tokens=False)
        assert [bare.id_to_token(one) for one in bare.encode(text).ids] == [
            made.token_name(one) for one in piece
        ]
        expected += piece
        piece = []

"""What the router remembers of prompts, compared with a list of all that was sent."""

from __future__ import annotations

import json

from fake_upstream import chunks_in_flight
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.prefixes.memory import (
    CHUNK,
    MAX_CHUNKS,
    MAX_ENGINES_PER_CHUNK,
    ChunksInFlight,
    PrefixMemory,
    chunk_keys,
)
from quire.cluster.prompts import GenerationBody

PROMPTS = st.lists(st.sampled_from([b"a" * CHUNK, b"b" * CHUNK, b"c" * CHUNK]), max_size=6).map(b"".join)
SENT = st.lists(st.tuples(PROMPTS, st.integers(1, MAX_ENGINES_PER_CHUNK)), max_size=20)


def common_chunks(one: bytes, other: bytes) -> int:
    count = 0
    while (count + 1) * CHUNK <= min(len(one), len(other)) and (
        one[: (count + 1) * CHUNK] == other[: (count + 1) * CHUNK]
    ):
        count += 1
    return count


@given(SENT, PROMPTS, st.binary(max_size=9))
def test_an_engine_matches_as_far_as_any_prompt_that_it_was_sent(sent, prompt, tail):
    memory = PrefixMemory(1000)
    for other, engine in sent:
        memory.note(chunk_keys(other + tail), engine)
    engines = range(1, MAX_ENGINES_PER_CHUNK + 1)
    assert memory.matched_bytes(chunk_keys(prompt), engines) == {
        engine: CHUNK * max((common_chunks(prompt, other) for other, one in sent if one == engine), default=0)
        for engine in engines
    }


@given(st.lists(st.tuples(PROMPTS, st.integers(1, 9)), min_size=1, max_size=20), st.integers(6, 9))
def test_it_never_grows_above_its_limit_and_knows_the_last_prompt(sent, limit):
    memory = PrefixMemory(limit)
    for prompt, engine in sent:
        memory.note(chunk_keys(prompt), engine)
        assert len(memory) <= limit
        assert memory.matched_bytes(chunk_keys(prompt), [engine]) == {engine: len(prompt)}


def test_a_beginning_is_kept_longer_than_what_comes_after_it():
    memory = PrefixMemory(3)
    prompt = b"".join(bytes([part]) * CHUNK for part in b"abc")
    memory.note(chunk_keys(prompt), 1)
    memory.note(chunk_keys(b"x" * CHUNK), 1)
    assert memory.matched_bytes(chunk_keys(prompt), [1]) == {1: 2 * CHUNK}


def test_of_an_endless_prompt_only_the_beginning_is_looked_at():
    assert len(chunk_keys(bytes(10 * MAX_CHUNKS * CHUNK))) == MAX_CHUNKS
    assert chunk_keys(bytes(CHUNK - 1)) == []


def test_prompts_with_different_salts_have_no_chunk_in_common():
    prompt = b"a" * 3 * CHUNK
    keys = [chunk_keys(prompt, salt) for salt in (b"", b'"one"', b'"two"')]
    assert len({key for some in keys for key in some}) == 9
    bodies = [json.dumps({"prompt": "a" * 3 * CHUNK, "cache_salt": salt}).encode() for salt in ("one", "two")]
    salted = [GenerationBody(body).prompt.chunk_keys for body in bodies]
    assert not set(salted[0]) & set(salted[1])


@given(st.lists(PROMPTS, max_size=6), st.data(), PROMPTS)
def test_an_engine_works_on_what_it_has_been_sent_and_not_answered(sent, data, prompt):
    in_flight = ChunksInFlight()
    for other in sent:
        in_flight.begin(chunk_keys(other))
    answered = data.draw(st.sets(st.integers(0, len(sent) - 1))) if sent else set()
    for index in answered:
        in_flight.end(chunk_keys(sent[index]))
    left = [other for index, other in enumerate(sent) if index not in answered]
    matched = max((common_chunks(prompt, other) for other in left), default=0)
    assert in_flight.matched_bytes(chunk_keys(prompt)) == CHUNK * matched
    for other in left:
        in_flight.end(chunk_keys(other))
    assert not chunks_in_flight(in_flight)

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from step_driver import plan

from quire.execution.sampling.positions import SamplingPositions
from quire.step import NO_TOKEN

TOKENS = st.integers(0, 2)


@st.composite
def step_rows(draw):
    """Rows of a step as (computed before, tokens, known, drafts): chunks, last chunks, decodes, drafts."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        known = draw(st.integers(1, 9))
        computed = draw(st.integers(0, known - 1))
        samples = draw(st.booleans())
        drafts = draw(st.lists(TOKENS, max_size=4)) if samples else []
        if not samples and known - computed < 2:
            samples = True
        end = known if samples else draw(st.integers(computed + 1, known - 1))
        rows.append((computed, end - computed + len(drafts), known, drafts))
    return rows


@settings(max_examples=200)
@given(rows=step_rows(), data=st.data())
def test_places_and_acceptance_are_those_of_the_plain_loop(rows, data):
    computed, num_tokens, known, drafts = zip(*rows, strict=True)
    ids = [str(index) for index in range(len(rows))]
    output = plan(range(len(rows)), num_tokens, computed, ids, known=known, drafts=list(drafts))
    places = SamplingPositions.of(output)
    expected_places, expected_tokens, sampled = [], [], []
    first = 0
    for row, (start, count, length, row_drafts) in enumerate(rows):
        if start + count >= length:
            chosen = data.draw(
                st.lists(
                    st.one_of(TOKENS, st.just(NO_TOKEN)),
                    min_size=len(row_drafts) + 1,
                    max_size=len(row_drafts) + 1,
                )
            )
            for offset in range(len(row_drafts) + 1):
                position = length + offset
                expected_places.append((row, offset, position, first + position - 1 - start))
            emitted = []
            for token, draft in zip(chosen, [*row_drafts, None], strict=True):
                if token == NO_TOKEN:
                    break
                emitted.append(token)
                if token != draft:
                    break
            expected_tokens.append(emitted)
            sampled += chosen
        first += count
    columns = (places.rows[places.request], places.offset, places.positions, places.tokens)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected_places
    accepted = places.accept(np.array(sampled, dtype=np.int64))
    assert accepted.shape == (len(expected_tokens), 1 + max(map(len, drafts)))
    assert [[t for t in row if t != NO_TOKEN] for row in accepted.tolist()] == expected_tokens
    for row, tokens in zip(accepted.tolist(), expected_tokens, strict=True):
        assert row[: len(tokens)] == tokens

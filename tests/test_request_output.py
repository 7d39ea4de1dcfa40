"""A prefix of a growing list equals the copy that it replaces."""

from hypothesis import given
from hypothesis import strategies as st

from quire.request_output import ListView

INDICES = st.none() | st.integers(-12, 12)


@given(st.lists(st.integers()), st.lists(st.integers()), INDICES, INDICES, st.integers(-3, 3).filter(bool))
def test_a_prefix_is_what_the_list_was(before, later, start, stop, step):
    entries = before.copy()
    prefix = ListView(entries)
    entries += later
    assert prefix == before
    assert before == prefix
    assert prefix == ListView(before)
    assert (prefix == entries) == (not later)
    assert list(prefix) == before
    assert list(reversed(prefix)) == before[::-1]
    assert prefix[start:stop:step] == before[start:stop:step]
    assert repr(prefix) == repr(before)
    assert bool(prefix) == bool(before)
    for index in range(-len(before) - 2, len(before) + 2):
        assert at(prefix, index) == at(before, index)
    assert prefix != tuple(before)


def at(entries, index):
    try:
        return entries[index]
    except IndexError:
        return None

"""What errors say about names that do not exist."""

import pytest

from quire.errors import nearest_name

KNOWN = ["max_tokens", "min_tokens", "stop", "a" * 300]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_tokns", "did you mean 'max_tokens'?"),
        ("xyz", f"known names: {'a' * 300}, max_tokens, min_tokens, stop"),
        ("a" * 299, f"known names: {'a' * 300}, max_tokens, min_tokens, stop"),  # which would take long
    ],
)
def test_the_nearest_name_or_all(name, said):
    assert nearest_name(name, KNOWN) == said

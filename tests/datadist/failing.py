"""What tests expect to fail, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from quire.datadist import LLMException, LLMStatusCode


@contextlib.contextmanager
def fails_with(code: LLMStatusCode) -> Iterator[None]:
    """Expect an `LLMException` with a code."""
    with pytest.raises(LLMException) as caught:
        yield
    assert caught.value.status_code == code, caught.value

"""Replacing a method by something that calls it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def call_through(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, replacement: Callable) -> None:
    """Put `replacement` in the place of a method or function, which it is given before the arguments."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))

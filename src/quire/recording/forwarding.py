"""Methods that forward their call to the same method of an attribute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def forwarded(attribute: str, method: Method) -> Method:
    """Return a method that calls the method of the same name of `self.<attribute>`."""

    @functools.wraps(method, updated=())  # not its dictionary, which says that it is abstract
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(getattr(self, attribute), method.__name__)(*arguments, **options)

    return cast("Method", forward)

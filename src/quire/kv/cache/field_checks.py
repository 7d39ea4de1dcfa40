"""Checks of a cache's description; every message names field and value."""

from __future__ import annotations

import math
import numbers
from typing import TypeGuard

from quire.kv.cache.page_layout import CACHE_DTYPES, FEATURE_MULTIPLES, KVLayerSpec


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless a field is a whole number above 0; names field and value."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")


def dtype_name(dtype: object) -> str:
    """Return the name of a type that a cache can have.

    Args:
        dtype: its name, torch's type, or numpy's as a dtype or as the class of its scalars; types that other
            libraries add to numpy's, such as bfloat16, are accepted too.

    Raises:
        ValueError: it is none; names it and those that are.
    """
    name = getattr(dtype, "__name__" if isinstance(dtype, type) else "name", None)
    name = str(dtype if name is None else name).removeprefix("torch.")
    if name not in CACHE_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; a KV cache holds {', '.join(CACHE_DTYPES)}")
    return name


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number, and no truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_layer(name: str, spec: KVLayerSpec, dtype: str) -> None:
    """Raise ValueError unless a cache of `dtype` can hold what a layer keeps; names field and value."""
    for field in ("num_kv_heads", "key_head_dim"):
        check_positive(f"{name}.{field}", getattr(spec, field))
    for field in ("value_head_dim", "window"):
        if not is_whole(getattr(spec, field)) or getattr(spec, field) < 0:
            raise ValueError(f"{name}.{field} is {getattr(spec, field)!r}; it must be at least 0")
    multiple = FEATURE_MULTIPLES.get(dtype, 1)
    for field in ("key_head_dim", "value_head_dim"):
        if getattr(spec, field) % multiple:
            raise ValueError(
                f"dtype is {dtype}, which needs a {name}.{field} that is a multiple of {multiple}, and this "
                f"is {getattr(spec, field)}; use another type"
            )

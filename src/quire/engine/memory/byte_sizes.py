"""Human-readable memory sizes."""

from __future__ import annotations

GB = 10**9


def format_bytes(size: float) -> str:
    """Return a readable size, in powers of 1000 like the GB of `cache_size`: 1234567 -> '1.23 MB'."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    index = 0
    while abs(size) >= 999.5 and index < len(units) - 1:
        size, index = size / 1000, index + 1
    return f"{size:.0f} B" if not index else f"{size:.3g} {units[index]}"

"""What a chat template has to say: which names it uses."""

from __future__ import annotations

import functools
import re

_EXPRESSION = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)


@functools.lru_cache(maxsize=64)
def uses_name(template: str, name: str) -> bool:
    """Whether a chat template uses a variable of this name, not only the word in a text or an attribute."""
    variable = re.compile(rf"""(?<![\w."']){re.escape(name)}(?![\w"'])""")
    return any(variable.search(found[0]) for found in _EXPRESSION.finditer(template))

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_settings import INSTRUCTION_SETS, instructions


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instructions(request.param):
        yield request.param

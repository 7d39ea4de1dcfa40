"""These tests run in Triton's interpreter, or on a GPU (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels.devices.device import cuda_obstacle
from quire.kernels.triton.device import is_interpreted

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is to run on a GPU where there is none; compiling needs none."""
    reason = "" if is_interpreted else cuda_obstacle()
    for item in items:
        if reason and HERE in item.path.parents and "compile" not in item.path.name:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))

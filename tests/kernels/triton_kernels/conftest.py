"""These tests run in Triton's interpreter, or on a GPU (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels.devices.device import cuda_obstacle
from quire.kernels.triton.device import is_interpreted

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the first cases are looked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is interpreted or compiled; skip what is to run on a GPU where there is none."""
    reason = "" if is_interpreted else cuda_obstacle()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("interpreter")
            if "compile" not in item.path.name:  # compiling takes long, and needs no GPU
                item.add_marker("first_case")
                if reason:
                    item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))

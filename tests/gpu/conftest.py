"""What is tested on a GPU only, with real shapes: `make test-gpu`.

Without a GPU, the same tests can be run in Triton's interpreter, with tiny shapes, to see that the tests
themselves are right: `QUIRE_TINY_GPU_TESTS=1 pytest tests/gpu`, which takes minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.kernels.devices.device import cuda_obstacle

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where there is no GPU, or where Triton does not use it."""
    if os.environ.get("QUIRE_TINY_GPU_TESTS"):
        return
    reason = cuda_obstacle()
    if not reason and os.environ["TRITON_INTERPRET"] != "0":
        reason = "TRITON_INTERPRET is not 0; `make test-gpu` runs this"
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))

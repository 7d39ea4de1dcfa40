"""An engine in this process, for commands that run whole batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.cli.progress import LoadingBar
from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.front.llm import LLM


@contextlib.contextmanager
def ready_llm(engine: EngineConfig) -> Iterator[LLM]:
    """Load the model of `engine`, showing progress; yield its `LLM`, and shut it down afterwards."""
    from quire.front.llm import LLM

    options = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    with LoadingBar(engine.model) as on_progress:
        llm = LLM(**options, on_load_progress=on_progress)
        llm.wait_until_ready()
    with llm:
        yield llm

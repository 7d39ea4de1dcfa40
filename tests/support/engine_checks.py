"""What engine tests share: a core whose invariants are checked after every step, and small helpers."""

from __future__ import annotations

import os
import select
from pathlib import Path

import preloaded
from quire import LLM, AsyncLLM, ContinuousBatchingPipeline, EngineConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.front.live_requests import LiveRequests

TINY = {"num_kv_blocks": 64, "num_threads": 1}


def tiny_config(model: str, **scheduler) -> EngineConfig:
    settings = {"num_kv_blocks": 64, **scheduler}
    return EngineConfig(model=model, num_threads=1, scheduler=SchedulerConfig(**settings))


def requests_of(llm: LLM | AsyncLLM | ContinuousBatchingPipeline) -> LiveRequests:
    """Return what the front keeps of the requests under way, which no caller would want to see."""
    return llm._requests if isinstance(llm, AsyncLLM) else llm._session.requests


def core_of(llm: LLM | ContinuousBatchingPipeline) -> EngineCore:
    """Return the engine of this process, which the front shows to nobody."""
    return requests_of(llm).client.core


def engine_pid() -> int:
    """Return the process id of the one engine that this process has started."""
    [engine] = preloaded.other_children()
    return engine.pid


def check_after_every_step(core: EngineCore) -> EngineCore:
    """Have the scheduler check its invariants after each step."""
    step = core.step

    def checked_step():
        result = step()
        core.scheduler.check_invariants()
        return result

    core.step = checked_step
    return core


def wait_for_end(pid: int, timeout: float = 60.0) -> bool:
    """Wait until a process, of whatever parent, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


def is_zombie(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z"

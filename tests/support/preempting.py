"""Preempting a running request by hand."""

from __future__ import annotations

from quire.scheduling import Scheduler


def preempt(scheduler: Scheduler, slot: int) -> None:
    """Preempt whatever runs in a slot, if anything, with all beams of its search."""
    scheduler._slots.preempt_if_running(int(slot))

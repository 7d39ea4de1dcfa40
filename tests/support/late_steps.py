"""Engines that share KV and take it that a device computes, which says late how far it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from late_device import LateDevice, LatePoint
from late_tokens import choose_on_device
from quire.engine.building import kv_peers


def compute_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps of engines that are opened from now on be in flight; returns what `choose_on_device` does."""
    monkeypatch.setattr(kv_peers, "_step_mark", lambda _: late_marks())
    return choose_on_device(monkeypatch)


def late_marks() -> Callable[[], LatePoint]:
    """Return what marks points of a device that gets to them now and then, or when they are waited for."""
    device, choose = LateDevice(), random.Random(7)

    def mark() -> LatePoint:
        while choose.random() < 0.5 and device.run(lambda ready: ready[0]):
            pass
        return device.mark()

    return mark

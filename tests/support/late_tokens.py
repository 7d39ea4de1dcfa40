"""Tokens that a device chooses, played by the host, which knows of one when somebody waits for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from host_choice import HostChoice
from quire.execution.sampling import prompt_logprobs, tokens_in_flight
from quire.execution.sampling.sampler import Sampler
from quire.kernels.dispatch import kernel_set


class LateCopy:
    """A copy that has arrived when it is waited for, and now and then before."""

    generator = np.random.default_rng(5)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.clone()
        self._is_waited_for = False

    @property
    def has_arrived(self) -> bool:
        return self._is_waited_for or self.generator.random() < 0.1

    def wait(self) -> torch.Tensor:
        self._is_waited_for = True
        return self._tensor


def choose_on_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have a device choose; returns how many tokens of each step only the device knew."""
    counts: list[int] = []
    encoded_ids = Sampler.encoded_ids

    def watched(self: Sampler, known: np.ndarray, last_of: np.ndarray) -> np.ndarray:
        counts.append(int((last_of >= 0).sum()))
        # What the host does not know must not matter.
        return encoded_ids(self, np.where(last_of >= 0, 10**6, known), last_of)

    monkeypatch.setattr(Sampler, "encoded_ids", watched)
    monkeypatch.setattr(type(kernel_set()), "sampling", HostChoice())
    for module in (tokens_in_flight, prompt_logprobs):
        monkeypatch.setattr(module, "HostCopy", LateCopy)
    monkeypatch.setattr(LateCopy, "generator", np.random.default_rng(5))  # whatever tests came before
    return counts

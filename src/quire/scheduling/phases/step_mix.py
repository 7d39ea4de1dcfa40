"""What may share a step: chunks of prompts with decoding tokens, or whole prompts by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from quire.config import SchedulerConfig
from quire.scheduling.accounts.plan import Plan

Phase = Callable[[Plan], None]


class StepMix(ABC):
    """Fills a step's budget from the running and the waiting requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    @abstractmethod
    def fill(self, plan: Plan, plan_running: Phase, admit_waiting: Phase) -> None:
        """Call the phases in the order, and under the conditions, of this mix."""

    @abstractmethod
    def first_chunk(self, num_tokens: int, budget: int) -> int:
        """Return how many of `num_tokens` uncomputed tokens a request may start with; 0: not in this step."""


class SplitFuse(StepMix):
    """Running requests first, and what is left of the budget goes to prompts, in chunks if need be.

    Source: Holmes et al. 2024, "DeepSpeed-FastGen" (dynamic SplitFuse); Agrawal et al. 2024, "Sarathi-Serve".
    """

    def fill(self, plan: Plan, plan_running: Phase, admit_waiting: Phase) -> None:
        """Decode and continue prompts, then admit."""
        plan_running(plan)
        admit_waiting(plan)

    def first_chunk(self, num_tokens: int, budget: int) -> int:
        """Return as many tokens as budget and `long_prefill_token_threshold` allow."""
        return min(num_tokens, budget, self._config.long_prefill_token_threshold or budget)


class WholePrompts(StepMix):
    """A step computes whole prompts, as many as fit; if there are none, the running requests' next tokens.

    After a step with prompts it is the running requests' turn, so that arrivals cannot starve them. Only what
    a preempted request must recompute may be longer than a step, since its output has grown; it is split.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._had_prompts = False

    def fill(self, plan: Plan, plan_running: Phase, admit_waiting: Phase) -> None:
        """Admit prompts or decode, by turns as long as there is both to do."""
        if not self._had_prompts:
            admit_waiting(plan)
        if not plan.has_admitted:
            plan_running(plan)
        if self._had_prompts and not plan.num_tokens.any():
            admit_waiting(plan)
        self._had_prompts = plan.has_admitted

    def first_chunk(self, num_tokens: int, budget: int) -> int:
        """Return all the tokens if they fit into the step."""
        if num_tokens > self._config.max_num_batched_tokens:
            return budget if budget == self._config.max_num_batched_tokens else 0
        return num_tokens if num_tokens <= budget else 0


def step_mix(config: SchedulerConfig) -> StepMix:
    """Return the mix that `dynamic_split_fuse` asks for."""
    return SplitFuse(config) if config.dynamic_split_fuse else WholePrompts(config)

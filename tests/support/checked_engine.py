"""An engine in this process, whose accounts are checked after each step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.config import EngineConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.request_options import RequestOptions
from quire.sampling_params import SamplingParams
from quire.scheduling.outputs import EngineCoreOutput

Prompt = Sequence[int] | np.ndarray


class CheckedEngine:
    """The engine.

    Args:
        path: the checkpoint, computed in float32.
        max_tokens: of each answer, if a call says no other.
        options: fields of `EngineConfig`, and all others of `SchedulerConfig`.
    """

    def __init__(self, path: Path, *, max_tokens: int, **options: Any) -> None:
        fields = {name: options.pop(name) for name in list(options) if hasattr(EngineConfig, name)}
        config = EngineConfig(
            model=str(path), dtype="float32", scheduler=SchedulerConfig(**options), **fields
        )
        self.core = EngineCore(config, path)
        self._max_tokens = max_tokens
        self._names = itertools.count()

    @property
    def stats(self) -> Any:
        return self.core.scheduler.make_stats()

    def outputs(
        self,
        prompts: Sequence[Prompt],
        begun: list[list[list[int]]] | None = None,
        transfers: list[dict[str, Any]] | None = None,
        **params: Any,
    ) -> list[list[EngineCoreOutput]]:
        """Return the outputs of each sequence; the prompts run together.

        `begun` has the tokens that another engine has generated for each prompt's sequences, and `transfers`
        the `kv_transfer_params` of each.
        """
        outputs = self.begin(prompts, begun, transfers, **params)
        while self.core.has_unfinished_requests():
            self.step(outputs)
        return list(outputs.values())

    def begin(
        self,
        prompts: Sequence[Prompt],
        begun: list[list[list[int]]] | None = None,
        transfers: list[dict[str, Any]] | None = None,
        **params: Any,
    ) -> dict[str, list[EngineCoreOutput]]:
        """Add prompts, and return where the outputs of each sequence go."""
        fields = {"temperature": 0.0, "max_tokens": self._max_tokens, "ignore_eos": True, **params}
        outputs: dict[str, list[EngineCoreOutput]] = {}
        for index, prompt in enumerate(prompts):
            names = [str(next(self._names)) for _ in range(fields.get("n", 1))]
            outputs |= {name: [] for name in names}
            request = EngineCoreRequest(
                names,
                [*range(len(names))],
                np.asarray(prompt).tolist(),
                SamplingParams(**fields),
                options=RequestOptions(kv_transfer_params=transfers and transfers[index]),
                resumed_outputs=None if begun is None else begun[index],
            )
            self.core.add(request)
        return outputs

    def step(self, outputs: dict[str, list[EngineCoreOutput]]) -> None:
        """Compute a step of what has been begun."""
        new = self.core.step()[0]
        for output in new:
            assert output.error is None
            outputs[output.request_id].append(output)
        self.core.scheduler.check_invariants()
        if not new:
            time.sleep(0.0005)  # for the threads of a connector

    def answers(self, prompts: Sequence[Prompt], **params: Any) -> list[list[tuple[int, float]]]:
        """Return each sequence's tokens and their log-probabilities."""
        return list(map(scored_tokens, self.outputs(prompts, logprobs=0, **params)))

    def scored(self, prompt: Prompt, tokens: list[int]) -> float:
        """Return the log-probability of an answer."""
        [outputs] = self.outputs([np.append(prompt, tokens)], max_tokens=1, prompt_logprobs=0)
        logprobs = [one.logprobs[0] for output in outputs for one in output.prompt_logprobs or () if one]
        return sum(logprobs[-len(tokens) :])


def scored_tokens(outputs: list[EngineCoreOutput]) -> list[tuple[int, float]]:
    """Return the tokens of a sequence and their log-probabilities."""
    return [(one.token_ids[0], one.logprobs[0]) for output in outputs for one in output.logprobs or ()]


def tokens(answers: list[list[Any]]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in answers]

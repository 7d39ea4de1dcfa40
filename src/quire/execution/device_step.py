"""A step whose tokens a device is still choosing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from typing_extensions import override

from quire.execution.persistent_batch import UnknownTokens
from quire.execution.sampling.positions import SamplingPositions
from quire.execution.sampling.prompt_logprobs import StepPromptLogprobs
from quire.execution.sampling.tokens_in_flight import SamplerOutput, TokensInFlight
from quire.step import (
    NO_TOKEN,
    DraftTokenIds,
    IntArray,
    KVConnectorOutput,
    ModelRunnerOutput,
    StepInFlight,
)


@dataclasses.dataclass(slots=True, frozen=True)
class DeviceStep(StepInFlight):
    """A step whose tokens a device is choosing."""

    _computed: ModelRunnerOutput  # without tokens
    _sampling: SamplingPositions
    tokens: TokensInFlight  # at the positions
    _prompt_logprobs: StepPromptLogprobs
    unknown: UnknownTokens  # to the batch
    _propose: Callable[[ModelRunnerOutput, float], DraftTokenIds | None]
    """Proposes drafts; its second argument is for how many seconds the tokens have been known."""
    kv_connector_output: KVConnectorOutput | None = None

    @override
    def result(self) -> ModelRunnerOutput:
        report_tokens(self._computed, self._sampling, self.tokens.sampled())
        self._prompt_logprobs.report(self._computed)
        if self.kv_connector_output is None:
            return self._computed
        return dataclasses.replace(self._computed, kv_connector_output=self.kv_connector_output)

    @override
    def drafts(self) -> DraftTokenIds | None:
        return self._propose(self._computed, time.perf_counter() - self.tokens.known_at)

    def emitted(self) -> IntArray:
        """Wait for the step's tokens and return those that count, as `SamplingPositions.accept`."""
        return self._sampling.accept(self.tokens.token_ids())

    @property
    def have_arrived(self) -> bool:
        """See `StepErrors`."""
        return self.tokens.have_arrived and self._prompt_logprobs.have_arrived

    def failed_ids(self) -> set[str]:
        """See `StepErrors`."""
        rows = self._sampling.rows[self.emitted()[:, 0] == NO_TOKEN]
        return {self._computed.request_ids[row] for row in rows.tolist()}.union(
            self._prompt_logprobs.errors()
        )


def report_tokens(result: ModelRunnerOutput, sampling: SamplingPositions, sampled: SamplerOutput) -> IntArray:
    """Put the tokens that a step emits into `result`, with their log-probabilities and errors.

    Returns:
        The tokens, [S, 1 + K], as `SamplingPositions.accept`.
    """
    emitted = sampling.accept(sampled.token_ids)
    result.sampled_token_ids[sampling.rows] = emitted
    for index, logprobs in sampled.logprobs.items():
        request = int(sampling.request[index])
        if emitted[request, sampling.offset[index]] != NO_TOKEN:
            result.logprobs.setdefault(result.request_ids[sampling.rows[request]], []).append(logprobs)
    for index, error in sampled.errors.items():
        if sampling.offset[index] == 0:
            request_id = result.request_ids[sampling.rows[sampling.request[index]]]
            result.errors[request_id] = error
            if index in sampled.error_params:
                result.error_params[request_id] = sampled.error_params[index]
    return emitted

"""The tokens of one step, which the host has or gets from a device, and their log-probabilities."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from quire.execution.sampling.constraints import RowMasks
from quire.kernels.devices.device import HostCopy
from quire.kernels.sampling.token_choice import RowLogprobs
from quire.step import NO_TOKEN, Int64Array, PositionLogprobs

NO_CHOICE = (
    "the request's grammar (structured_outputs) or allowed_token_ids leave no token to choose: together "
    "with min_tokens, bad_words or logit_bias, all are banned here; relax one of them"
)


@dataclasses.dataclass(slots=True, frozen=True)
class SamplerOutput:
    """The tokens of one step; `logprobs` and `errors` by row, for the rows that have them.

    `error_params` is as in `ModelRunnerOutput`.
    """

    token_ids: Int64Array  # [R], NO_TOKEN for a row with an error
    logprobs: dict[int, PositionLogprobs]
    errors: dict[int, str]
    error_params: dict[int, str]


@dataclasses.dataclass(slots=True, frozen=True)
class ReportedLogprobs:
    """The log-probabilities that S rows report."""

    rows: Int64Array  # [S] which
    counts: Int64Array  # [S] how many of the likeliest tokens each of them reports
    found: RowLogprobs


class TokensInFlight:
    """The tokens of the rows of one call, which a device may still be choosing.

    Every caller gets the same: either the tokens, or the device's error.

    Args:
        token_ids, maxima: see `TokenChoice.choose`.
        masks: of the rows; None: all tokens are allowed.
        grammars: the masks among these that are a grammar's.
        logprobs: of the rows that report any; None: none do.
        are_known: whether the host has all of that.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        maxima: torch.Tensor,
        *,
        masks: RowMasks | None,
        grammars: RowMasks | None,
        logprobs: ReportedLogprobs | None,
        are_known: bool = False,
    ) -> None:
        self._masks = masks
        self._grammars = grammars
        self._logprobs = logprobs
        tensors = [token_ids, maxima]
        if logprobs is not None:
            tensors += [logprobs.found.token_ids, logprobs.found.logprobs, logprobs.found.ranks]
        self._copies = [] if are_known else [HostCopy(tensor) for tensor in tensors]
        self._lock = threading.Lock()
        self._outcome: list[torch.Tensor] | Exception | None = tensors if are_known else None
        self.known_at = time.perf_counter() if are_known else math.inf
        """When the host had the tokens, by `time.perf_counter`."""

    @property
    def have_arrived(self) -> bool:
        """Whether waiting returns at once, also if only to raise the device's error."""
        try:
            return self._outcome is not None or all(copy.has_arrived for copy in self._copies)
        except Exception:  # which every caller that waits gets
            return True

    def token_ids(self) -> Int64Array:
        """Return the token of each row [R], NO_TOKEN where there is an error, as soon as the host has them.

        Raises:
            Exception: whatever the device has failed with.
        """
        token_ids: Int64Array = self._wait()[0].numpy()
        return token_ids

    def sampled(self) -> SamplerOutput:
        """Return all that was asked for as soon as the host has it; raises as `token_ids`."""
        chosen, largest, *of_logprobs = self._wait()
        token_ids = chosen.numpy()
        errors, error_params = {}, {}
        for row in (token_ids == NO_TOKEN).nonzero()[0].tolist():
            maximum = largest[row].item()
            if maximum == -np.inf and self._masks is not None and self._masks.is_masked[row]:
                has_grammar = self._grammars is not None and self._grammars.is_masked[row]
                errors[row] = NO_CHOICE
                error_params[row] = "structured_outputs" if has_grammar else "allowed_token_ids"
            else:
                errors[row] = nonfinite_error(maximum)
        logprobs = {}
        if self._logprobs is not None:
            positions = position_logprobs(of_logprobs, self._logprobs.counts)
            found = zip(self._logprobs.rows.tolist(), positions, strict=True)
            logprobs = {row: position for row, position in found if row not in errors}
        return SamplerOutput(token_ids, logprobs, errors, error_params)

    def _wait(self) -> list[torch.Tensor]:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = [copy.wait() for copy in self._copies]
                except Exception as error:
                    self._outcome = error
                self.known_at = time.perf_counter()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def position_logprobs(found: list[torch.Tensor], num_logprobs: Int64Array) -> Iterator[PositionLogprobs]:
    """Yield the log-probabilities at each row's position.

    Args:
        found: token ids, log-probabilities and ranks as in `RowLogprobs`; on the host.
        num_logprobs: [S] how many of the likeliest tokens each row reports.
    """
    columns = zip(num_logprobs.tolist(), *(column.tolist() for column in found), strict=True)
    for count, ids, values, rank in columns:
        end = 1 + count
        yield PositionLogprobs(ids[:end], values[:end], [rank, *range(1, len(ids[:end]))])


def nonfinite_error(largest_logit: float | np.float32) -> str:
    """Return the error of a row whose largest logit is not a finite number."""
    kind = "NaN" if np.isnan(largest_logit) else "infinite"
    return (
        f"the model produced {kind} logits for this request; the weights may be damaged, "
        "or the range of EngineConfig.dtype is too small for this model: try bfloat16 or float32"
    )

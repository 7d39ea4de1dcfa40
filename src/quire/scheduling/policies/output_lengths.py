"""How long outputs will be, from how long past ones were."""

from __future__ import annotations

from collections import deque

import numpy as np

from quire.request import Request
from quire.status import RequestStatus
from quire.step import IntArray

WINDOW = 1000  # past outputs that count
GOLDEN_RATIO = (5**0.5 - 1) / 2


class OutputLengths:
    """The last `WINDOW` output lengths of requests that came to their own end, in tokens."""

    def __init__(self) -> None:
        self._past: deque[int] = deque(maxlen=WINDOW)
        self._sorted: IntArray | None = np.empty(0, dtype=np.int32)

    def learn(self, request: Request) -> None:
        """Take note of a request that has left its slot; a preemption or an abort says nothing of length."""
        if request.status in {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}:
            self._past.append(len(request.output_token_ids))
            self._sorted = None

    def remaining(self, num_output: IntArray, most: IntArray) -> IntArray:
        """Predict how many tokens each request will still get, [R], from 0 to `most` ([R]).

        A request that has n output tokens gets a length from the past outputs longer than n, or its limit,
        which counts as one more past output: without any history, all get their limits. The paper draws at
        random; here the requests are spread evenly over the distribution, so that a run can be repeated.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._past, dtype=np.int32, count=len(self._past)))
        past = self._sorted
        first_longer = np.searchsorted(past, num_output, side="right")
        quantile = (np.arange(1, len(num_output) + 1) * GOLDEN_RATIO) % 1.0
        index = first_longer + (quantile * (len(past) - first_longer + 1)).astype(np.int64)
        predicted = np.append(past, np.int32(np.iinfo(np.int32).max))[index]
        remaining: IntArray = np.minimum(predicted - num_output, most).astype(np.int32)
        return remaining

"""Requests for tests of policies, without an engine around them."""

from __future__ import annotations

import itertools

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.status import RequestStatus


class Arrivals:
    """Makes requests that arrive one after the other."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def request(self, num_prompt=1, *, max_tokens=None, at=0.0, prompt=None, **fields) -> Request:
        """Return a request with the next arrival number; `prompt` wins over `num_prompt`."""
        arrival = next(self._numbers)
        token_ids = [0] * num_prompt if prompt is None else prompt
        request = Request(f"r{arrival}", token_ids, SamplingParams(max_tokens=max_tokens), **fields)
        request.arrival = arrival
        request.arrival_time = at
        return request

    def take_place(self, request: Request, at: float) -> None:
        """Number and date a request as if it came only now."""
        request.arrival = next(self._numbers)
        request.queued_time = at


def run_to(request: Request, num_output: int, status: RequestStatus) -> Request:
    """Give a request so many output tokens in all, and a status."""
    request.output_token_ids += [1] * (num_output - len(request.output_token_ids))
    request.status = status
    return request

"""The limit of log-probabilities in one answer, which are kept until it is complete."""

from __future__ import annotations

from quire.errors import InvalidRequestError
from quire.front.text.input_processor import ProcessedRequest


class LogprobLimit:
    """Counts the log-probabilities that a call asks for, prompt by prompt.

    Args:
        limit: maximum number of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num = 0

    def admit(self, processed: ProcessedRequest) -> None:
        """Count those of one more prompt; what ranking needs besides is not kept.

        Raises:
            InvalidRequestError: the call asks for too many.
        """
        request, params = processed.core_request, processed.params
        if params.logprobs is not None:
            num_tokens = len(request.sequences) * (params.max_tokens or 0)
            self._num += num_tokens * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            self._num += len(request.prompt_token_ids) * (params.prompt_logprobs + 1)
        if self._num > self._limit:
            raise InvalidRequestError(
                f"the request asks for {self._num} log-probabilities or more, and the limit is {self._limit} "
                "(max_logprobs_per_request): completions times tokens times candidates for each; lower n, "
                "max_tokens, logprobs or the number of prompts",
                param="logprobs",
            )

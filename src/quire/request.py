"""What a request is: how to sample, where it stands, and what comes back."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config import config, knob
from quire.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_INT64 = 2**63 - 1  # larger integers do not fit into the messages to the engine process


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything from FINISHED_STOPPED on is terminal."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_IGNORED = 8
    FINISHED_ERROR = 9


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @classmethod
    def of(cls, status: RequestStatus) -> FinishReason:
        """Return the reason for a terminal status; `KeyError` for any other."""
        return _FINISH_REASONS[status]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@config
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Penalties follow the field's practice: repetition divides or multiplies logits of tokens seen in prompt or
    output (Keskar et al. 2019); presence and frequency subtract per OpenAI's formula, over the output only.
    """

    n: int = knob(default=1, help="Completions per prompt.")
    max_tokens: int | None = knob(
        default=None, help="Most output tokens. None: as many as the model's length leaves."
    )
    min_tokens: int = knob(
        default=0, help="Fewest output tokens before end-of-sequence or a stop token may end it."
    )
    temperature: float = knob(default=1.0, help="Divides the logits; 0 is greedy.")
    top_k: int = knob(default=0, help="Sample among the k likeliest tokens. 0: all.")
    top_p: float = knob(default=1.0, help="Sample among the fewest tokens whose probabilities sum to this.")
    min_p: float = knob(default=0.0, help="Drop tokens less likely than this times the likeliest one.")
    repetition_penalty: float = knob(default=1.0, help="Above 1 makes tokens seen so far less likely.")
    presence_penalty: float = knob(
        default=0.0, help="Subtracted from the logit of each token in the output, -2 to 2."
    )
    frequency_penalty: float = knob(default=0.0, help="Subtracted per occurrence in the output, -2 to 2.")
    logit_bias: Mapping[int, float] = dataclasses.field(
        default_factory=dict, metadata={"help": "Added to the logits of these token ids, -100 to 100."}
    )
    bad_words: tuple[str, ...] = knob(
        default=(), help="Strings that must not appear in the output, at most 256."
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = knob(
        default=(), help="Token sequences that must not appear, at most 1,024."
    )
    stop: tuple[str, ...] = knob(default=(), help="Strings that end the output; left out of the text.")
    stop_token_ids: tuple[int, ...] = knob(
        default=(), help="Token ids that end the output, besides end-of-sequence; at most 128."
    )
    include_stop_str_in_output: bool = knob(
        default=False, help="Keep the stop string at the end of the text."
    )
    ignore_eos: bool = knob(default=False, help="Go on after end-of-sequence.")
    seed: int | None = knob(
        default=None, help="Same seed, same tokens. None: drawn at random when the request arrives."
    )
    logprobs: int | None = knob(
        default=None, help="Log-probabilities of the chosen and this many likeliest tokens."
    )
    prompt_logprobs: int | None = knob(default=None, help="The same for the prompt's tokens.")
    skip_special_tokens: bool = knob(default=True, help="Leave special tokens out of the text.")

    def __post_init__(self) -> None:
        for name, (kind, most) in _LISTS.items():
            object.__setattr__(self, name, self._distinct_entries(name, kind, most))
        self._check_ranges()
        self._check_logit_bias()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        for name in ("bad_words", "stop"):
            if any(not word for word in getattr(self, name)):
                raise InvalidRequestError(f"{name} holds an empty string", param=name)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def _distinct_entries(self, name: str, kind: str, most: float) -> tuple[Any, ...]:
        """Return a list's entries as a tuple, each once."""
        value = getattr(self, name)
        try:
            entries = [value] if isinstance(value, str) else list(value)
            if name == "bad_words_token_ids":
                entries = [tuple(sequence) for sequence in entries]
            distinct = tuple(dict.fromkeys(entries))
        except TypeError as error:
            raise InvalidRequestError(f"{name} is {value!r}; it must hold {kind}", param=name) from error
        if len(distinct) > most:
            raise InvalidRequestError(f"{name} holds {len(distinct)} {kind}; at most {most} fit", param=name)
        return distinct

    def _check_ranges(self) -> None:
        for name, low, high in _SAMPLING_RANGES:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, (int, float)) or not low <= value <= high:  # also refuses NaN
                limit = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise InvalidRequestError(f"{name} is {value!r}; it must be {limit}", param=name)
        if self.top_p <= 0 or self.repetition_penalty <= 0:
            name = "top_p" if self.top_p <= 0 else "repetition_penalty"
            raise InvalidRequestError(f"{name} is {getattr(self, name)}; it must be above 0", param=name)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is {self.logit_bias!r}; it must be a mapping of token ids to numbers",
                param="logit_bias",
            )
        for bias in self.logit_bias.values():
            if not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"a logit_bias is {bias!r}; each must be from -100 to 100", param="logit_bias"
                )


_LISTS: dict[str, tuple[str, float]] = {  # what they hold, and how much of it
    "bad_words": ("strings", 256),
    "bad_words_token_ids": ("lists of token ids", 1024),  # gone through for every sampled token
    "stop": ("strings", math.inf),
    "stop_token_ids": ("token ids", 128),  # the most of all requests is a width of the scheduler's arrays
}

_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")

_SAMPLING_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 1, math.inf),
    ("min_tokens", 0, math.inf),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, MAX_INT64),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), MAX_INT64),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


class Request:
    """One sequence that the scheduler serves: its prompt, its output so far, and where it stands.

    Args:
        request_id: unique among the engine's live requests.
        prompt_token_ids: at least one token id.
        sampling_params: with `seed` and `max_tokens` set (the front end resolves both).
        eos_token_ids: the model's end-of-sequence ids; ignored with `ignore_eos`.
        priority: lower is served first under the priority policy.
        client_index: which client the outputs go to.
        cache_salt: requests share prefix-cache blocks only with requests of the same salt.

    The scheduler numbers requests as they arrive (`arrival`) and keeps the tokens of running ones itself:
    `output_token_ids` and `num_computed_tokens` are up to date whenever the request does not run.
    """

    __slots__ = (
        "arrival", "cache_salt", "client_index", "eos_token_ids",
        "num_cached_tokens", "num_computed_tokens", "output_token_ids", "priority",
        "prompt_token_ids", "request_id", "sampling_params", "status", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        client_index: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.sampling_params = sampling_params
        self.eos_token_ids = tuple(eos_token_ids)
        self.arrival = 0
        self.priority = priority
        self.client_index = client_index
        self.cache_salt = cache_salt
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return self.prompt_token_ids + self.output_token_ids

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"
        )


@dataclasses.dataclass(slots=True)
class Logprob:
    """One candidate token at one position: log-probability (nats), rank (1 is likeliest), text."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""The chosen token and the likeliest ones at one position, by token id."""


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    `logprobs` has one entry for each of `token_ids`, or is None if not asked for. `stop_reason` is the stop
    string or stop token id that ended it, None for end-of-sequence or any other end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """All that is known of a request: cumulative, not the difference to the last output.

    `prompt_logprobs` has one entry for each prompt token, the first of them None. `num_cached_tokens` counts
    prompt tokens whose KV came out of the prefix cache. `metrics` is filled when the request has finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """A finished request's times in seconds: to the first token, and from arrival to the end."""

    time_to_first_token: float
    total_time: float
    num_output_tokens: int


def prompt_text_or_ids(prompt: Any) -> str | list[int]:
    """Return a prompt as text or as a list of token ids.

    Raises:
        InvalidRequestError: if it is neither.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}", param="prompt"
        )
    for token in prompt:
        if type(token) is not int:
            raise InvalidRequestError(
                f"a prompt that is a list must hold token ids, each an int, not {type(token).__name__}",
                param="prompt",
            )
    return list(prompt)

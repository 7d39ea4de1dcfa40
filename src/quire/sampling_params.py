"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from quire.config import config, knob
from quire.errors import InvalidRequestError
from quire.limits import NonNegativeInt, PositiveInt, violation
from quire.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # each beam needs as many likeliest tokens, and one per ending token
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_STOP_LENGTH = 1024  # characters
_MAX_INT64 = 2**63 - 1  # larger integers do not fit into the messages to the engine process

TokenId = Annotated[int, Ge(0), Le(2**31 - 1)]
Bias = Annotated[float, Ge(-100), Le(100)]
Probability = Annotated[float, Ge(0), Le(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]
BadWord = Annotated[str, MinLen(1), MaxLen(MAX_BAD_WORD_LENGTH)]
StopText = Annotated[str, MinLen(1), MaxLen(MAX_STOP_LENGTH)]
NumSequences = Annotated[int, Ge(1), Le(128)]
NumLogprobs = Annotated[int, Ge(0), Le(MAX_LOGPROBS)]


@config
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Penalties follow the usual definitions: the repetition penalty divides or multiplies the logits of tokens
    that occur in prompt or output (Keskar et al. 2019); presence and frequency penalties are subtracted as in
    OpenAI's formula, over the output only.

    Raises:
        InvalidRequestError: a value is outside its limits, or values contradict each other.
        ConfigError: there is no field of that name.
    """

    n: NumSequences = knob(default=1, unit="completions", help="Number of completions per prompt.")
    best_of: NumSequences | None = knob(
        default=None,
        unit="completions",
        help="Number of completions to generate; the n with the highest cumulative log-probability "
        "are returned. None: n.",
    )
    max_tokens: PositiveInt | None = knob(
        default=None,
        unit="tokens",
        help="Maximum number of output tokens. None: as many as fit within the model's maximum length.",
    )
    min_tokens: NonNegativeInt = knob(
        default=0,
        unit="tokens",
        help="Minimum number of output tokens before end-of-sequence or a stop token may end the output.",
    )
    temperature: Annotated[float, Ge(0), Le(100)] = knob(
        default=1.0, help="Divides the logits before sampling. 0: greedy, always the most likely token."
    )
    top_k: Annotated[int, Ge(0), Le(_MAX_INT64)] = knob(
        default=0, unit="tokens", help="Sample among the k most likely tokens. 0: all."
    )
    top_p: Annotated[float, Gt(0), Le(1)] = knob(
        default=1.0,
        unit="probability",
        help="Sample among the smallest set of tokens whose probabilities sum to at least this.",
    )
    min_p: Probability = knob(
        default=0.0,
        unit="probability",
        help="Drop tokens whose probability is below this fraction of the most likely token's.",
    )
    # Logits are divided by it in float32, where a tiny one is 0.
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = knob(
        default=1.0, help="Above 1 makes tokens that occur in prompt or output less likely."
    )
    presence_penalty: Penalty = knob(
        default=0.0, unit="logits", help="Subtracted from the logit of each token that occurs in the output."
    )
    frequency_penalty: Penalty = knob(
        default=0.0,
        unit="logits",
        help="Subtracted from a token's logit for each of its occurrences in the output.",
    )
    logit_bias: Mapping[TokenId, Bias] = knob(
        default_factory=dict, unit="token ids", help="Added to the logits of these token ids."
    )
    # Every sampled token is chosen among them.
    allowed_token_ids: Annotated[tuple[TokenId, ...], MaxLen(1024)] = knob(
        default=(),
        unit="token ids",
        help="The only token ids that may occur in the output, end-of-sequence included. Empty: all.",
    )
    bad_words: Annotated[tuple[BadWord, ...], MaxLen(256)] = knob(
        default=(),
        unit=f"strings of 1 to {MAX_BAD_WORD_LENGTH} characters",
        help="Strings whose tokens, alone or after a space, must not follow each other in the output. "
        "Written with other tokens, as within a longer word, they may still occur.",
    )
    # Every sampled token is compared with each of them.
    bad_words_token_ids: Annotated[tuple[tuple[TokenId, ...], ...], MaxLen(1024)] = knob(
        default=(), unit="lists of token ids", help="Token sequences that must not occur in the output."
    )
    stop: Annotated[tuple[StopText, ...], MaxLen(16)] = knob(
        default=(),
        unit=f"strings of 1 to {MAX_STOP_LENGTH} characters",
        help="Strings that end the output; left out of the text.",
    )
    # The largest number of all requests is a width of the scheduler's arrays.
    stop_token_ids: Annotated[tuple[TokenId, ...], MaxLen(128)] = knob(
        default=(), unit="token ids", help="Token ids that end the output, besides end-of-sequence."
    )
    include_stop_str_in_output: bool = knob(
        default=False, help="Keep the stop string at the end of the text."
    )
    ignore_eos: bool = knob(default=False, help="Continue after end-of-sequence.")
    seed: Annotated[int, Ge(-(2**63)), Le(_MAX_INT64)] | None = knob(
        default=None,
        help="Seed for sampling; the same seed gives the same tokens. None: random for each request.",
    )
    logprobs: NumLogprobs | None = knob(
        default=None,
        unit="tokens",
        help="Number of most likely tokens whose log-probabilities are returned for each output token, "
        "besides the chosen token's own. None: no log-probabilities.",
    )
    prompt_logprobs: NumLogprobs | None = knob(
        default=None, unit="tokens", help="The same for each prompt token."
    )
    skip_special_tokens: bool = knob(default=True, help="Leave special tokens out of the text.")
    beam_width: Annotated[int, Ge(0), Le(MAX_BEAM_WIDTH)] = knob(
        default=0,
        unit="beams",
        help="Number of beams in beam search, of which the n best are returned. 0: no beam search.",
    )
    num_beam_groups: Annotated[int, Ge(1), Le(MAX_BEAM_WIDTH)] = knob(
        default=1, unit="groups", help="Number of groups of equal size that the beams are divided into."
    )
    diversity_penalty: Annotated[float, Ge(0), Le(100)] = knob(
        default=0.0,
        unit="logits",
        help="Subtracted from a token's logit for each beam of an earlier group that takes it in the same "
        "step.",
    )
    length_penalty: Annotated[float, Ge(-10), Le(10)] = knob(
        default=1.0,
        help="Beams are ranked by log-probability / length ^ this: above 0 favors longer ones.",
    )
    stop_criteria: Literal["early", "heuristic", "never"] = knob(
        default="heuristic",
        help="When beam search ends: as soon as enough beams have finished (early), when better ones are "
        "unlikely (heuristic), or when they are impossible (never).",
    )
    structured_outputs: StructuredOutputsParams | None = knob(
        default=None, help="A grammar that the output must follow: json, regex, choice or grammar."
    )

    def __post_init__(self) -> None:
        for name in _LISTS:
            given = getattr(self, name)
            if given or type(given) is not tuple:
                object.__setattr__(self, name, _distinct_entries(given))
        if (found := violation(self)) is not None:
            name, refusal = found
            raise InvalidRequestError(f"{name} {refusal}", param=name)
        self._make_floats()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        self._check_best_of()
        self._check_beam_search()
        if self.structured_outputs is not None and self.structured_outputs.structure is not None:
            self._check_structured_outputs()

    def _make_floats(self) -> None:
        """Make floats of whole numbers, so that equal parameters are written alike, to recordings for one."""
        for name in _FLOATS:
            if type(number := getattr(self, name)) is int:
                object.__setattr__(self, name, float(number))
        if self.logit_bias:
            biases = {token_id: float(bias) for token_id, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)

    def with_checked(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values for some fields, which are not checked again."""
        changed = object.__new__(type(self))
        for name in self.__slots__:  # type: ignore[attr-defined]
            object.__setattr__(changed, name, getattr(self, name))
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Completions that are generated, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_verbatim(self) -> bool:
        """Whether the output keeps the space with which it begins, since a structure may ask for that."""
        return self.structured_outputs is not None and self.structured_outputs.may_begin_output

    @property
    def is_ranked(self) -> bool:
        """Whether completions are ranked against each other, so that none is known before all have ended."""
        return self.beam_width > 0 or self.num_sequences > self.n

    def _check_structured_outputs(self) -> None:
        """Refuse what would leave no token to choose: a grammar that is complete allows only the end."""
        if self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos is True, but with structured_outputs the output ends where its grammar ends; "
                "leave ignore_eos out",
                param="ignore_eos",
            )
        if self.min_tokens > 0:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but with structured_outputs the grammar says how short "
                "the output may be; leave min_tokens out, and put the least length into the grammar, as with "
                "minLength or minItems",
                param="min_tokens",
            )

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.n:
            raise InvalidRequestError(
                f"best_of is {self.best_of}; it must be at least n, which is {self.n}", param="best_of"
            )
        if self.best_of > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"best_of is {self.best_of}, but at temperature 0 all completions are the same; raise the "
                "temperature, or set best_of to 1",
                param="best_of",
            )

    def _check_beam_search(self) -> None:
        """Refuse inconsistent beam parameters, and parameters without meaning with or without beam search."""
        width, groups = self.beam_width, self.num_beam_groups
        for name, neutral in (_NOT_WITH_BEAM_SEARCH if width else _ONLY_WITH_BEAM_SEARCH).items():
            if getattr(self, name) != neutral:
                problem = (
                    f"beam search (beam_width {width}) does not take it; leave it out, or set beam_width to 0"
                    if width
                    else "it needs beam search; set beam_width"
                )
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r:.80}, but {problem}", param=name)
        if not width:
            return
        for name, is_wrong, limit in (
            ("beam_width", width == 1, f"0 for none, or from 2 to {MAX_BEAM_WIDTH}"),
            ("n", self.n > width, f"at most beam_width, which is {width}"),
            ("temperature", self.temperature not in (0, 1), "0 or 1 with beam search, which does not sample"),
            ("num_beam_groups", width % groups != 0, f"a divisor of beam_width, which is {width}"),
            (
                "diversity_penalty",
                groups == 1 and self.diversity_penalty > 0,
                "0 unless there are several groups; raise num_beam_groups",
            ),
        ):
            if is_wrong:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}; it must be {limit}", param=name
                )


def _distinct_entries(given: Any) -> Any:
    """Return the entries of a list, or a single string, each once; `given` itself if it is neither."""
    try:
        entries = [given] if isinstance(given, str) else list(given)
        return tuple(dict.fromkeys(map(_immutable, entries)))
    except TypeError:
        return given


def _immutable(entry: Any) -> Any:
    return tuple(entry) if isinstance(entry, Iterable) and not isinstance(entry, str) else entry


_FLOATS = [field.name for field in dataclasses.fields(SamplingParams) if isinstance(field.default, float)]
_LISTS = ("allowed_token_ids", "bad_words", "bad_words_token_ids", "stop", "stop_token_ids")

_ONLY_WITH_BEAM_SEARCH: dict[str, Any] = {  # with the values that have no effect
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "stop_criteria": "heuristic",
}

_NOT_WITH_BEAM_SEARCH: dict[str, Any] = {  # it ranks tokens by the model's own probabilities
    "best_of": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": (),
    "bad_words": (),
    "bad_words_token_ids": (),
    "structured_outputs": None,
}

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
"""Of requests whose token is of no interest, if they have any."""

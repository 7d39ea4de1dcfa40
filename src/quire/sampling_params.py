"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from quire.config import config, knob
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # each beam needs as many likeliest tokens, and one per ending token
STOP_CRITERIA = ("early", "heuristic", "never")
MAX_INT64 = 2**63 - 1  # larger integers do not fit into the messages to the engine process


@config
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Penalties follow the field's practice: repetition divides or multiplies logits of tokens seen in prompt or
    output (Keskar et al. 2019); presence and frequency subtract per OpenAI's formula, over the output only.
    """

    n: int = knob(default=1, help="Completions per prompt.")
    best_of: int | None = knob(
        default=None,
        help="Generate this many and return the n of the highest cumulative log-probability. None: n.",
    )
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
    beam_width: int = knob(
        default=0, help="Beam search with this many beams, of which the n best are returned. 0: none."
    )
    num_beam_groups: int = knob(default=1, help="Groups of equal size that the beams are divided into.")
    diversity_penalty: float = knob(
        default=0.0, help="Cost of a token for each beam of an earlier group that takes it in the same step."
    )
    length_penalty: float = knob(
        default=1.0, help="Beams are ranked by log-probability / length ^ this: above 0 favors longer ones."
    )
    stop_criteria: str = knob(
        default="heuristic",
        help="Beam search ends when enough have finished: at once (early), when better ones are unlikely "
        "(heuristic) or impossible (never).",
    )
    structured_outputs: StructuredOutputsParams | None = knob(
        default=None, help="A grammar that the output must follow: json, regex, choice or grammar."
    )

    def __post_init__(self) -> None:
        for name, (kind, most) in _LISTS.items():
            object.__setattr__(self, name, self._distinct_entries(name, kind, most))
        self._check_ranges()
        self._check_logit_bias()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        self._check_best_of()
        self._check_beam_search()
        for name in ("bad_words", "stop"):
            if any(not word for word in getattr(self, name)):
                raise InvalidRequestError(f"{name} holds an empty string", param=name)
        if self.structured_outputs is not None:
            self._check_structured_outputs()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Completions that are generated, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether completions are ranked against each other, so that none is known before all have ended."""
        return self.beam_width > 0 or self.num_sequences > self.n

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

    def _check_structured_outputs(self) -> None:
        """Refuse what would leave no token to choose: a grammar that is complete allows only the end."""
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs is {self.structured_outputs!r:.80}; it must be StructuredOutputsParams",
                param="structured_outputs",
            )
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
        """Refuse beams that do not go together, and what has no meaning with or without beam search."""
        width, groups = self.beam_width, self.num_beam_groups
        for name, neutral in (_NOT_WITH_BEAM_SEARCH if width else _ONLY_WITH_BEAM_SEARCH).items():
            if getattr(self, name) != neutral:
                problem = (
                    f"beam search (beam_width {width}) does not take it; leave it out, or set beam_width to 0"
                    if width
                    else "it needs beam search; set beam_width"
                )
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}, but {problem}", param=name)
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
            ("stop_criteria", self.stop_criteria not in STOP_CRITERIA, f"one of {', '.join(STOP_CRITERIA)}"),
        ):
            if is_wrong:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)!r}; it must be {limit}", param=name
                )

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
    "bad_words": (),
    "bad_words_token_ids": (),
    "structured_outputs": None,
}

_MAY_BE_NONE = ("best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs")

_SAMPLING_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("best_of", 1, 128),
    ("beam_width", 0, MAX_BEAM_WIDTH),
    ("num_beam_groups", 1, MAX_BEAM_WIDTH),
    ("diversity_penalty", 0.0, 100.0),
    ("length_penalty", -10.0, 10.0),
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

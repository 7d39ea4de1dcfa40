"""`GenerationConfig`: sampling parameters under the names that OpenVINO GenAI users know."""

from __future__ import annotations

from typing import Any, Literal, Self

from quire.config import check_limits, knob, refuse_unknown_names, settable_config
from quire.errors import ConfigError
from quire.limits import PositiveInt
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams


@settable_config
class StructuredOutputConfig:
    """A grammar that the output must follow: exactly one of the fields."""

    json_schema: str | None = knob(default=None, help="JSON schema, as text.")
    regex: str | None = knob(default=None, help="Regular expression that the whole output must match.")
    grammar: str | None = knob(default=None, help="Context-free grammar, in Lark or GBNF notation.")

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(StructuredOutputConfig, {name: value})
        object.__setattr__(self, name, value)

    def params(self) -> StructuredOutputsParams:
        """Return the same as `StructuredOutputsParams`.

        Raises:
            InvalidRequestError: not exactly one of the fields is given, or it is unusable.
        """
        return StructuredOutputsParams(json=self.json_schema, regex=self.regex, grammar=self.grammar)


@settable_config
class GenerationConfig:
    """How to generate. Fields may be set as attributes or given as keyword arguments.

    `max_new_tokens` wins over `max_length`. Without `do_sample` the likeliest token is always taken, or with
    `num_beams` the likeliest sequences are searched for.
    """

    max_new_tokens: PositiveInt | None = knob(
        default=None, help="Most tokens to generate. None: what max_length or the model's length leaves."
    )
    max_length: int | None = knob(default=None, help="Most tokens, prompt and output together.")
    min_new_tokens: int = knob(default=0, help="Fewest tokens before end-of-sequence may end the output.")
    ignore_eos: bool = knob(default=False, help="Go on after end-of-sequence.")
    eos_token_id: int | None = knob(default=None, help="End-of-sequence token id. None: the model's own ids.")
    stop_strings: tuple[str, ...] = knob(default=(), help="Strings that end the output.")
    include_stop_str_in_output: bool = knob(default=False, help="Keep the stop string in the text.")
    stop_token_ids: tuple[int, ...] = knob(default=(), help="Token ids that end the output.")
    repetition_penalty: float = knob(default=1.0, help="Above 1 makes tokens seen so far less likely.")
    presence_penalty: float = knob(default=0.0, help="Subtracted from the logit of each token in the output.")
    frequency_penalty: float = knob(default=0.0, help="Subtracted per occurrence in the output.")
    do_sample: bool = knob(default=False, help="Draw tokens at random instead of taking the likeliest.")
    temperature: float = knob(default=1.0, help="Divides the logits.")
    top_p: float = knob(default=1.0, help="Sample among the fewest tokens whose probabilities sum to this.")
    top_k: int = knob(default=0, help="Sample among the k likeliest tokens. 0: all.")
    min_p: float = knob(default=0.0, help="Drop tokens less likely than this times the likeliest one.")
    rng_seed: int = knob(default=0, help="Same seed, same tokens.")
    num_return_sequences: int = knob(
        default=1, help="Completions per prompt; more than 1 needs do_sample or num_beams."
    )
    num_beams: PositiveInt = knob(default=1, help="Above 1: beam search with this many beams.")
    num_beam_groups: int = knob(default=1, help="Groups of equal size that the beams are divided into.")
    diversity_penalty: float = knob(
        default=0.0, help="Cost of a token for each beam of an earlier group that takes it in the same step."
    )
    length_penalty: float = knob(
        default=1.0, help="Beams are ranked by log-probability / length ^ this: above 0 favors longer ones."
    )
    stop_criteria: Literal["early", "heuristic", "never"] = knob(
        default="heuristic", help="When beam search ends: early, heuristic or never; see SamplingParams."
    )
    logprobs: int = knob(
        default=0,
        help="Above 0: return the log-probabilities of the generated tokens. 0: do not.",
    )
    echo: bool = knob(default=False, help="Put the prompt in front of the output.")
    structured_output_config: StructuredOutputConfig | None = knob(
        default=None, help="A grammar that the output must follow."
    )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(GenerationConfig, {name: value})
        object.__setattr__(self, name, value)

    def validate(self) -> Self:
        """Return self if every value is usable.

        Raises:
            ConfigError: fields contradict each other.
            InvalidRequestError: a value is out of its range.
        """
        check_limits(self)
        if self.num_beams > 1 and self.do_sample:
            raise ConfigError(
                f"num_beams is {self.num_beams}, but beam search does not sample; set do_sample=False, or "
                "num_beams=1"
            )
        if self.num_return_sequences > 1 and not self.do_sample and self.num_beams == 1:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}, but without do_sample all completions "
                "would be the same; set do_sample=True, or num_beams, or num_return_sequences=1"
            )
        if self.structured_output_config is not None and self.eos_token_id is not None:
            raise ConfigError(
                f"eos_token_id is {self.eos_token_id}, but structured_output_config needs the "
                "model's own end-of-sequence ids; leave eos_token_id out"
            )
        self.sampling_params(self.max_new_tokens)
        return self

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Return the same as `SamplingParams`, with at most `max_tokens` tokens of output."""
        replaces_eos = self.eos_token_id is not None and not self.ignore_eos
        structure = self.structured_output_config
        return SamplingParams(
            n=self.num_return_sequences,
            max_tokens=max_tokens,
            min_tokens=self.min_new_tokens,
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=self.stop_strings,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=(*self.stop_token_ids, *((self.eos_token_id,) if replaces_eos else ())),
            ignore_eos=self.ignore_eos or replaces_eos,
            seed=self.rng_seed,
            logprobs=self.logprobs or None,
            beam_width=self.num_beams if self.num_beams > 1 else 0,
            num_beam_groups=self.num_beam_groups,
            diversity_penalty=self.diversity_penalty,
            length_penalty=self.length_penalty,
            stop_criteria=self.stop_criteria,
            structured_outputs=None if structure is None else structure.params(),
        )

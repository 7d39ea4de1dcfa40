"""`GenerationConfig`: sampling parameters under OpenVINO GenAI's names."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from quire.config import SettableConfig, knob, refuse_unknown_names, settable_config, stands_for
from quire.errors import ConfigError, InvalidRequestError
from quire.limits import PositiveInt, violation
from quire.sampling_params import SamplingParams, TokenId
from quire.structured_outputs import StructuredOutputsParams


@settable_config()
class StructuredOutputConfig(SettableConfig):
    """A grammar that constrains the output; exactly one field must be set."""

    json_schema: str | None = knob(default=None, help="JSON schema, as text.")
    regex: str | None = knob(default=None, help="Regular expression that the whole output must match.")
    grammar: str | None = knob(default=None, help="Context-free grammar, in Lark or GBNF notation.")

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(StructuredOutputConfig, {name: value})
        object.__setattr__(self, name, value)

    def params(self) -> StructuredOutputsParams:
        """Return the equivalent `StructuredOutputsParams`.

        Raises:
            InvalidRequestError: not exactly one field is set, or its value is invalid.
        """
        return StructuredOutputsParams(json=self.json_schema, regex=self.regex, grammar=self.grammar)


@settable_config()
class GenerationConfig(SettableConfig):
    """Generation parameters, set as keyword arguments or attributes.

    `max_new_tokens` takes precedence over `max_length`. Without `do_sample`, decoding is greedy, or a beam
    search if `num_beams` is above 1.
    """

    max_new_tokens: int | None = stands_for(
        SamplingParams,
        "max_tokens",
        default=None,
        help="Maximum number of tokens to generate. None: up to max_length or max_model_len.",
    )
    max_length: PositiveInt | None = knob(
        default=None,
        unit="tokens",
        help="Maximum number of tokens, prompt and output together.",
    )
    min_new_tokens: int = stands_for(SamplingParams, "min_tokens", default=0)
    ignore_eos: bool = stands_for(SamplingParams, "ignore_eos", default=False)
    eos_token_id: TokenId | None = knob(
        default=None, help="End-of-sequence token id. None: the model's own ids."
    )
    stop_strings: tuple[str, ...] = stands_for(SamplingParams, "stop", default=())
    include_stop_str_in_output: bool = stands_for(SamplingParams, "include_stop_str_in_output", default=False)
    stop_token_ids: tuple[int, ...] = stands_for(SamplingParams, "stop_token_ids", default=())
    repetition_penalty: float = stands_for(SamplingParams, "repetition_penalty", default=1.0)
    presence_penalty: float = stands_for(SamplingParams, "presence_penalty", default=0.0)
    frequency_penalty: float = stands_for(SamplingParams, "frequency_penalty", default=0.0)
    do_sample: bool = knob(default=False, help="Sample tokens. Off: always choose the most likely token.")
    temperature: float = stands_for(SamplingParams, "temperature", default=1.0)
    top_p: float = stands_for(SamplingParams, "top_p", default=1.0)
    top_k: int = stands_for(SamplingParams, "top_k", default=0)
    min_p: float = stands_for(SamplingParams, "min_p", default=0.0)
    rng_seed: int = stands_for(SamplingParams, "seed", default=0)
    num_return_sequences: int = stands_for(
        SamplingParams,
        "n",
        default=1,
        help="Number of completions per prompt; more than 1 needs do_sample or num_beams.",
    )
    num_beams: PositiveInt = knob(
        default=1, unit="beams", help="Number of beams in beam search. 1: no beam search."
    )
    num_beam_groups: int = stands_for(SamplingParams, "num_beam_groups", default=1)
    diversity_penalty: float = stands_for(SamplingParams, "diversity_penalty", default=0.0)
    length_penalty: float = stands_for(SamplingParams, "length_penalty", default=1.0)
    stop_criteria: str = stands_for(SamplingParams, "stop_criteria", default="heuristic")
    logprobs: int = stands_for(
        SamplingParams,
        "logprobs",
        default=0,
        help="Above 0: return the log-probabilities of the generated tokens. 0: none.",
    )
    echo: bool = knob(default=False, help="Prepend the prompt to the output.")
    structured_output_config: StructuredOutputConfig | None = knob(
        default=None, help="Grammar that constrains the output."
    )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_unknown_names(GenerationConfig, {name: value})
        if name == "stop_strings" and isinstance(value, str):
            value = (value,)
        object.__setattr__(self, name, value)

    def validate(self) -> Self:
        """Return self if all values are valid.

        Raises:
            ConfigError: fields contradict each other.
            InvalidRequestError: a value is out of range.
        """
        if (found := violation(self)) is not None:
            name, refusal = found
            raise InvalidRequestError(f"{name} {refusal}", param=name)
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
        """Return the equivalent `SamplingParams`, with at most `max_tokens` output tokens."""
        replaces_eos = self.eos_token_id is not None and not self.ignore_eos
        structure = self.structured_output_config
        own = {
            "max_tokens": max_tokens,
            "temperature": self.temperature if self.do_sample else 0.0,
            "stop_token_ids": (*self.stop_token_ids, *((self.eos_token_id,) if replaces_eos else ())),
            "ignore_eos": self.ignore_eos or replaces_eos,
            "logprobs": self.logprobs or None,
            "beam_width": self.num_beams if self.num_beams > 1 else 0,
            "structured_outputs": None if structure is None else structure.params(),
        }
        same = {
            field.metadata["stands_for"][1]: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if "stands_for" in field.metadata
        }
        return SamplingParams(**{**same, **own})

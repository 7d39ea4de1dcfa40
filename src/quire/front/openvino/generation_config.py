"""`GenerationConfig`: sampling parameters under OpenVINO GenAI's names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Never, Self

from annotated_types import Ge, Le

from quire.config import Choice, SettableConfig, knob, settable_config, stands_for
from quire.errors import ConfigError, InvalidRequestError, ModelError
from quire.limits import NonNegativeInt, PositiveInt, violation
from quire.models.checkpoints.json_files import read_json
from quire.sampling_params import MAX_BEAM_WIDTH, SamplingParams
from quire.structured_outputs import StructuredOutputsParams

UNSET = 2**64 - 1
"""OpenVINO GenAI's value for "no limit"."""

_OF_SAMPLING = ("temperature", "top_p", "min_p")
_STOP_CRITERIA_BY_EARLY_STOPPING: dict[bool | str, str] = {True: "early", False: "heuristic"}


class StopCriteria(Choice):
    """When a beam search ends; see `SamplingParams.stop_criteria`."""

    EARLY = "early"
    HEURISTIC = "heuristic"
    NEVER = "never"


@settable_config()
class StructuredOutputConfig(SettableConfig):
    """A grammar that constrains the output; exactly one field must be set."""

    UNSUPPORTED: ClassVar[Mapping[str, Any]] = {"structural_tags_config": None, "compound_grammar": None}

    json_schema: str | None = knob(default=None, help="JSON schema, as text.")
    regex: str | None = knob(default=None, help="Regular expression that the whole output must match.")
    grammar: str | None = knob(default=None, help="Context-free grammar, in Lark or GBNF notation.")

    def params(self) -> StructuredOutputsParams:
        """Return the equivalent `StructuredOutputsParams`.

        Raises:
            InvalidRequestError: not exactly one field is set, or its value is invalid.
        """
        return StructuredOutputsParams(json=self.json_schema, regex=self.regex, grammar=self.grammar)


def _refuse_compound(*parts: Any, **named_parts: Any) -> Never:
    raise ConfigError(
        "compound grammars are not supported; write a whole one, in Lark notation, as "
        "StructuredOutputConfig.grammar"
    )


for _name in (
    "AnyText", "Concat", "ConstString", "EBNF", "JSONSchema", "QwenXMLParametersFormat", "Regex", "Tag",
    "TagsWithSeparator", "TriggeredTags", "Union",
):  # fmt: skip
    setattr(StructuredOutputConfig, _name, staticmethod(_refuse_compound))


@settable_config()
class GenerationConfig(SettableConfig):
    """Generation parameters, set as keyword arguments or attributes; None stands for the default.

    `max_new_tokens` takes precedence over `max_length`. Without `do_sample`, decoding is greedy, or a beam
    search if `num_beams` is above 1, and sampling parameters have no effect. Other fields of OpenVINO GenAI
    can only be set to their defaults.

    Args:
        json_path: file to take values from first, such as a model's `generation_config.json`.

    Raises:
        ConfigError: there is no field of that name, or it is not supported.
        ModelError: the file cannot be read.
    """

    UNSUPPORTED: ClassVar[Mapping[str, Any]] = {
        "adapters": None,
        "assistant_confidence_threshold": 0.0,
        "branching_factor": 1,
        "parsers": [],
        "pruning_ratio": 0,
        "relevance_weight": 0.5,
        "return_omni_outputs": False,
        "tree_depth": 0,
    }

    max_new_tokens: PositiveInt = knob(
        default=UNSET,
        unit="tokens",
        help="Maximum number of tokens to generate. 2^64 - 1: up to max_length or max_model_len.",
    )
    max_length: PositiveInt = knob(
        default=UNSET,
        unit="tokens",
        help="Maximum number of tokens, prompt and output together. 2^64 - 1: max_model_len.",
    )
    min_new_tokens: int = stands_for(SamplingParams, "min_tokens", default=0)
    ignore_eos: bool = stands_for(
        SamplingParams, "ignore_eos", default=False, help="Continue after end-of-sequence and stop tokens."
    )
    eos_token_id: Annotated[int, Ge(-1), Le(2**31 - 1)] = knob(
        default=-1, help="End-of-sequence token id. -1: the model's own ids."
    )
    stop_strings: frozenset[str] = stands_for(SamplingParams, "stop", default=frozenset())
    include_stop_str_in_output: bool = stands_for(SamplingParams, "include_stop_str_in_output", default=False)
    stop_token_ids: frozenset[int] = stands_for(SamplingParams, "stop_token_ids", default=frozenset())
    repetition_penalty: float = stands_for(SamplingParams, "repetition_penalty", default=1.0)
    presence_penalty: float = stands_for(SamplingParams, "presence_penalty", default=0.0)
    frequency_penalty: float = stands_for(SamplingParams, "frequency_penalty", default=0.0)
    do_sample: bool = knob(default=False, help="Sample tokens. Off: always choose the most likely token.")
    temperature: float = stands_for(SamplingParams, "temperature", default=1.0)
    top_p: float = stands_for(SamplingParams, "top_p", default=1.0)
    top_k: NonNegativeInt = knob(
        default=UNSET, unit="tokens", help="Sample among the k most likely tokens. 0 or 2^64 - 1: all."
    )
    min_p: float = stands_for(SamplingParams, "min_p", default=0.0)
    rng_seed: int = stands_for(SamplingParams, "seed", default=0)
    num_return_sequences: int = stands_for(
        SamplingParams,
        "n",
        default=1,
        help="Number of completions per prompt; more than 1 needs do_sample or num_beams.",
    )
    num_beams: Annotated[int, Ge(1), Le(MAX_BEAM_WIDTH)] = knob(
        default=1, unit="beams", help="Number of beams in beam search. 1: no beam search."
    )
    num_beam_groups: int = stands_for(SamplingParams, "num_beam_groups", default=1)
    diversity_penalty: float = stands_for(SamplingParams, "diversity_penalty", default=0.0)
    length_penalty: float = stands_for(SamplingParams, "length_penalty", default=1.0)
    stop_criteria: StopCriteria = knob(
        default=StopCriteria.HEURISTIC,
        help="When beam search ends; see `SamplingParams.stop_criteria`.",
    )
    no_repeat_ngram_size: NonNegativeInt = knob(
        default=UNSET, unit="tokens", help="Not supported: only 0 or 2^64 - 1 (no limit)."
    )
    logprobs: int = stands_for(
        SamplingParams,
        "logprobs",
        default=0,
        help="Above 0: return the log-probabilities of the generated tokens. 0: none.",
    )
    echo: bool = knob(default=False, help="Prepend the prompt to the output.")
    apply_chat_template: bool = knob(
        default=True,
        help="Apply the model's chat template, if it has one, to a text prompt as the user's message.",
    )
    structured_output_config: StructuredOutputConfig | None = knob(
        default=None, help="Grammar that constrains the output."
    )
    num_assistant_tokens: NonNegativeInt | None = knob(
        default=None,
        unit="tokens",
        help="Above 0: use draft tokens for this request, which needs a pipeline with prompt_lookup and does "
        "not change the output. The pipeline sets their number.",
    )
    max_ngram_size: NonNegativeInt = knob(
        default=0, unit="tokens", help="Above 0, with num_assistant_tokens: drafts come from the prompt."
    )

    def __init__(self, json_path: str | Path | None = None, /, **values: Any) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)
        if json_path is not None:
            try:
                self.update_generation_config(**_read(Path(json_path)))
            except TypeError as error:
                raise ModelError(f"{json_path} holds a value of a wrong type: {error}") from error
        self.update_generation_config(**values)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name in _DEFAULTS:
            value = _DEFAULTS[name]
        elif name == "stop_strings" and isinstance(value, str):
            value = frozenset((value,))
        elif name in ("stop_strings", "stop_token_ids") and isinstance(value, list | tuple | set):
            with contextlib.suppress(TypeError):  # unhashable values are refused later
                value = frozenset(value)
        SettableConfig.__setattr__(self, name, value)  # the class has slots: no super()

    def update_generation_config(self, **values: Any) -> None:
        """Set several fields, `eos_token_id` as `set_eos_token_id` does.

        Raises:
            ConfigError: there is no field of that name, or it is not supported.
        """
        for name, value in values.items():
            setattr(self, name, value)
        if "eos_token_id" in values and self.eos_token_id != -1:
            self.set_eos_token_id(self.eos_token_id)

    def set_eos_token_id(self, eos_token_id: int) -> None:
        """Set the end-of-sequence token, and add it to the stop tokens."""
        self.eos_token_id = eos_token_id
        self.stop_token_ids = self.stop_token_ids | {eos_token_id}

    def is_greedy_decoding(self) -> bool:
        """Whether the most likely token is chosen each time."""
        return not self.do_sample and not self.is_beam_search()

    def is_beam_search(self) -> bool:
        """Whether there is more than one beam."""
        return self.num_beams > 1

    def is_multinomial(self) -> bool:
        """Whether tokens are sampled."""
        return self.do_sample

    def is_assisting_generation(self) -> bool:
        """Whether drafts are asked for."""
        return bool(self.num_assistant_tokens)

    def is_prompt_lookup(self) -> bool:
        """Whether drafts from the prompt are asked for."""
        return self.is_assisting_generation() and self.max_ngram_size > 0

    def is_tree_search(self) -> bool:
        """Whether drafts branch: always False."""
        return False

    def validate(self) -> Self:
        """Return self if all values are valid.

        Raises:
            ConfigError: fields contradict each other, or a value is not supported.
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
        if self.no_repeat_ngram_size not in (0, UNSET):
            raise ConfigError(
                f"no_repeat_ngram_size is {self.no_repeat_ngram_size}, but Quire does not support it; leave "
                "it out, or set repetition_penalty"
            )
        if self.max_ngram_size and not self.is_assisting_generation():
            raise ConfigError(
                f"max_ngram_size is {self.max_ngram_size}, but num_assistant_tokens is "
                f"{self.num_assistant_tokens}; set it to the number of draft tokens, or max_ngram_size to 0"
            )
        self.sampling_params(self.max_new_tokens)
        return self

    def sampling_params(self, max_tokens: int, model_eos_token_ids: Collection[int] = ()) -> SamplingParams:
        """Return the equivalent `SamplingParams`.

        Args:
            max_tokens: maximum number of output tokens; `UNSET`: as many as fit.
            model_eos_token_ids: ids that end a sequence unless `eos_token_id` is set to another.

        Raises:
            ConfigError: fields contradict each other.
            InvalidRequestError: a value is out of range.
        """
        own_eos = frozenset({self.eos_token_id} - {-1})
        stop_token_ids = frozenset() if self.ignore_eos else self.stop_token_ids | own_eos
        replaces_eos = bool(own_eos) and not stop_token_ids.issuperset(model_eos_token_ids)
        structure = self.structured_output_config
        if structure is not None and replaces_eos and not self.ignore_eos:
            raise ConfigError(
                f"eos_token_id is {self.eos_token_id}, but structured_output_config needs the "
                f"model's own end-of-sequence ids, {sorted(model_eos_token_ids)}; leave eos_token_id out"
            )
        own: dict[str, Any] = {
            "max_tokens": None if max_tokens == UNSET else max_tokens,
            "stop": tuple(sorted(self.stop_strings)),
            "stop_token_ids": tuple(sorted(stop_token_ids)),
            "ignore_eos": self.ignore_eos or replaces_eos,
            "logprobs": self.logprobs or None,
            "structured_outputs": None if structure is None else structure.params(),
            "temperature": self.temperature if self.do_sample else 0.0,
            "beam_width": self.num_beams if self.is_beam_search() else 0,
            "stop_criteria": str(self.stop_criteria),
        }
        if self.do_sample:
            own["top_k"] = 0 if self.top_k == UNSET else self.top_k
        same = {
            field.metadata["stands_for"][1]: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if "stands_for" in field.metadata and (self.do_sample or field.name not in _OF_SAMPLING)
        }
        return SamplingParams(**{**same, **own})


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(GenerationConfig)}


def _read(path: Path) -> dict[str, Any]:
    """Return the known fields of a `generation_config.json`; others are ignored.

    Raises:
        ModelError: it cannot be read.
    """
    entries = read_json(path)
    if entries is None:
        raise ModelError(f"there is no file {path}")
    known = {*_DEFAULTS, *GenerationConfig.UNSUPPORTED}
    values = {name: value for name, value in entries.items() if name in known}
    if isinstance(early := entries.get("early_stopping"), bool | str):
        values["stop_criteria"] = _STOP_CRITERIA_BY_EARLY_STOPPING.get(early, early)
    if isinstance(eos := values.get("eos_token_id"), list) and eos:
        values["eos_token_id"] = eos[0]
        values.setdefault("stop_token_ids", eos)
    return values

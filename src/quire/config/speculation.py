"""Drafts of the next tokens."""

from __future__ import annotations

from typing import Literal

from quire.config.fields import check_limits, config, knob
from quire.errors import ConfigError
from quire.limits import NonNegativeInt, PositiveInt


@config
class SpeculationConfig:
    """Speculative decoding: drafts of the next tokens, several of which the model verifies at once.

    The output is unchanged. The more requests run, the fewer tokens are drafted for each, because a large
    batch gains nothing from more positions: see `draft_length`.
    """

    speculative_method: Literal["none", "ngram", "suffix", "draft-model"] = knob(
        default="none",
        help="Where drafts come from: none, ngram (the last time that the last tokens occurred in the "
        "request), suffix (what followed them most often, in the request and in earlier outputs of the same "
        "tenant), or draft-model (a smaller model, see draft_model).",
    )
    num_speculative_tokens: PositiveInt = knob(
        default=4, unit="tokens", help="Maximum number of draft tokens per request and step."
    )
    max_num_draft_tokens: PositiveInt = knob(
        default=32,
        unit="tokens",
        help="Maximum number of draft tokens per step, shared evenly among the running requests.",
    )
    ngram_min: PositiveInt = knob(default=2, unit="tokens", help="Shortest n-gram or suffix to match.")
    ngram_max: PositiveInt = knob(default=4, unit="tokens", help="Longest n-gram to match.")
    suffix_max: PositiveInt = knob(default=24, unit="tokens", help="Longest suffix to match.")
    suffix_history: NonNegativeInt = knob(
        default=65536,
        unit="tokens",
        help="Newest output tokens of each tenant (and cache_salt) that the method suffix copies from; 0: "
        "none, only from the request itself.",
    )
    draft_model: str = knob(
        default="",
        help="Model that drafts, given as for model; it must have the same tokens. Empty: none.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"SpeculationConfig.ngram_max is {self.ngram_max}; it must be at least ngram_min, "
                f"{self.ngram_min}"
            )
        if self.suffix_max < self.ngram_min:
            raise ConfigError(
                f"SpeculationConfig.suffix_max is {self.suffix_max}; it must be at least ngram_min, "
                f"{self.ngram_min}"
            )
        if self.speculative_method == "draft-model" and not self.draft_model:
            raise ConfigError(
                "SpeculationConfig.draft_model is empty; speculative_method draft-model needs the name of one"
            )
        if self.draft_model and self.speculative_method != "draft-model":
            raise ConfigError(
                f"SpeculationConfig.draft_model is {self.draft_model!r}, but speculative_method is "
                f"{self.speculative_method!r}; set it to draft-model to use it"
            )

    def draft_length(self, num_running: int) -> int:
        """Return how many tokens to draft for each of `num_running` requests."""
        if self.speculative_method == "none":
            return 0
        return min(self.num_speculative_tokens, self.max_num_draft_tokens // max(1, num_running))

    def max_drafts(self, max_num_seqs: int) -> int:
        """Return the maximum number of draft tokens in a step of up to `max_num_seqs` requests."""
        if self.speculative_method == "none":
            return 0
        return min(self.num_speculative_tokens * max_num_seqs, self.max_num_draft_tokens)

"""What a benchmark runs: fields with their defaults, units and meanings, as in `quire.config`."""

from __future__ import annotations

import math

from quire.config import config, knob, require_at_least, require_one_of
from quire.errors import ConfigError, nearest_name

DATASETS = ("random", "sharegpt", "alpaca", "mooncake")
DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 128
OBJECTIVES = ("ttft", "tpot", "latency")


@config
class WorkloadConfig:
    """Which requests a benchmark sends: how many, and how long their prompts and outputs are."""

    dataset: str = knob(
        default="random",
        help="Lengths: random (of --input-len and --output-len), or drawn around the published means of "
        "sharegpt, alpaca, or mooncake (long prompts whose first half is shared).",
    )
    num_prompts: int = knob(default=64, help="Requests that are measured.")
    input_len: int | None = knob(
        default=None,
        help=f"Tokens of each prompt that no other has; with random only. Unset: {DEFAULT_INPUT_LEN}.",
    )
    output_len: int | None = knob(
        default=None, help=f"Tokens of each output; with random only. Unset: {DEFAULT_OUTPUT_LEN}."
    )
    prefix_len: int | None = knob(
        default=None,
        help="Tokens that all prompts begin with, in front of --input-len; with random only. Unset: none.",
    )
    scale: float | None = knob(
        default=None, help="Factor on all lengths of a dataset other than random. Unset: 1."
    )
    warmup: int = knob(default=1, help="Requests that are sent first and not measured.")
    seed: int = knob(default=0, help="Where lengths, tokens and arrivals are drawn from.")

    def __post_init__(self) -> None:
        require_one_of(self, "dataset", DATASETS)
        require_at_least(self, 1, "num_prompts")
        require_at_least(self, 0, "warmup", "seed")
        if self.dataset == "random":
            self._refuse_given("scale", meant_for="a dataset other than random")
        else:
            for name in ("input_len", "output_len", "prefix_len"):
                self._refuse_given(name, meant_for="--dataset random")
        for name, minimum in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) is not None:
                require_at_least(self, minimum, name)
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ConfigError(f"--scale is {self.scale}; it must be above 0 and finite")

    def _refuse_given(self, name: str, *, meant_for: str) -> None:
        value = getattr(self, name)
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but --dataset is {self.dataset}; "
                f"leave it out or use {meant_for}"
            )


@config
class ArrivalConfig:
    """When requests are sent, and what counts as served well."""

    request_rate: float = knob(default=math.inf, help="Requests per second on the average. inf: all at once.")
    burstiness: float = knob(
        default=1.0,
        help="Shape of the gaps between arrivals, which are gamma distributed: 1 is a Poisson process, less "
        "comes in bursts, more is more regular.",
    )
    max_concurrency: int = knob(
        default=0, help="Most requests under way; one that arrives beyond waits to be sent. 0: no limit."
    )
    goodput: tuple[str, ...] = knob(
        default=(),
        help="Objective as NAME:MILLISECONDS for ttft, tpot or latency; goodput counts the requests that "
        "meet all of them.",
    )

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(
                f"--request-rate is {self.request_rate}; it must be above 0, inf for all at once"
            )
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(
                f"--burstiness is {self.burstiness}; it must be above 0 and finite, 1 for a Poisson process"
            )
        require_at_least(self, 0, "max_concurrency")
        self.objectives()

    def objectives(self) -> dict[str, float]:
        """Return the objectives of `goodput` in seconds, by name."""
        return dict(map(_objective, self.goodput))


def _objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        raise ConfigError(f"--goodput names {name!r}; {nearest_name(name, OBJECTIVES)}")
    try:
        milliseconds = float(limit)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ConfigError(f"--goodput {text}: {limit!r} must be milliseconds above 0, as in ttft:200")
    return name, milliseconds / 1000


@config
class TargetConfig:
    """A server to measure in place of an engine of the benchmark's own."""

    base_url: str = knob(
        default="",
        help="Measure a running OpenAI-compatible server at this URL, such as http://127.0.0.1:8000/v1. "
        "MODEL then only lends its tokenizer. Empty: start an engine.",
    )
    served_model_name: str = knob(
        default="", help="Name to ask that server for. Empty: the first that it lists."
    )
    api_key: str = knob(default="", help="Bearer token to send to that server. Empty: none.")

    def __post_init__(self) -> None:
        if not self.base_url:
            for flag, value in (("served-model-name", self.served_model_name), ("api-key", self.api_key)):
                if value:
                    raise ConfigError(f"--{flag} is for a server; give its --base-url too")
        elif not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url is {self.base_url!r}; it must begin with http:// or https://")


@config
class LatencyConfig:
    """One batch that is run again and again."""

    batch_size: int = knob(default=8, help="Requests in the batch.")
    input_len: int = knob(default=32, help="Tokens of each prompt.")
    output_len: int = knob(default=128, help="Tokens of each output.")
    repeats: int = knob(default=10, help="Measured runs of the batch.")
    warmup: int = knob(default=2, help="Runs that come first and are not measured.")
    seed: int = knob(default=0, help="Where tokens are drawn from.")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "batch_size", "input_len", "output_len", "repeats")
        require_at_least(self, 0, "warmup", "seed")

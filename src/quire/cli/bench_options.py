"""Configuration of benchmarks: fields with their defaults, units and meanings, as in `quire.config`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Gt, Le

from quire.config import check_limits, config, knob
from quire.errors import ConfigError, nearest_name
from quire.limits import NonNegativeInt, PositiveInt

DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 128
OBJECTIVES = ("ttft", "tpot", "latency")


@config
class WorkloadConfig:
    """The requests that a benchmark sends: how many, and how long their prompts and outputs are."""

    dataset: Literal["random", "sharegpt", "alpaca", "mooncake"] = knob(
        default="random",
        help="Lengths: random (equal for all, --input-len and --output-len), or drawn from "
        "distributions with the published means of sharegpt, alpaca, or mooncake (long prompts with a "
        "shared first half).",
    )
    num_prompts: PositiveInt = knob(default=64, unit="requests", help="Number of measured requests.")
    input_len: PositiveInt | None = knob(
        default=None,
        unit="tokens",
        help="Length of the unique part of each prompt; only with dataset random. "
        f"Unset: {DEFAULT_INPUT_LEN}.",
    )
    output_len: PositiveInt | None = knob(
        default=None,
        unit="tokens",
        help=f"Length of each output; only with dataset random. Unset: {DEFAULT_OUTPUT_LEN}.",
    )
    prefix_len: NonNegativeInt | None = knob(
        default=None,
        unit="tokens",
        help="Length of a prefix that all prompts share, before --input-len; only with dataset random. "
        "Unset: none.",
    )
    scale: Annotated[float, Gt(0)] | None = knob(
        default=None, help="Factor on all lengths of a dataset other than random. Unset: 1."
    )
    warmup: NonNegativeInt = knob(
        default=1, unit="requests", help="Number of warm-up requests, sent first and not measured."
    )
    seed: NonNegativeInt = knob(default=0, help="Seed for lengths, tokens and arrival times.")

    def __post_init__(self) -> None:
        check_limits(self)
        if self.dataset == "random":
            self._refuse_given("scale", meant_for="a dataset other than random")
        else:
            for name in ("input_len", "output_len", "prefix_len"):
                self._refuse_given(name, meant_for="--dataset random")

    def _refuse_given(self, name: str, *, meant_for: str) -> None:
        value = getattr(self, name)
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, but --dataset is {self.dataset}; "
                f"leave it out or use {meant_for}"
            )


@config
class ArrivalConfig:
    """When requests are sent, and the objectives for goodput."""

    request_rate: Annotated[float, Gt(0), Le(math.inf)] = knob(
        default=math.inf, unit="requests/s", help="Average arrival rate. inf: all requests at once."
    )
    burstiness: Annotated[float, Gt(0)] = knob(
        default=1.0,
        help="Shape of the gamma distribution of the gaps between arrivals. 1: Poisson arrivals; below 1: "
        "burstier; above 1: more regular.",
    )
    max_concurrency: NonNegativeInt = knob(
        default=0,
        unit="requests",
        help="Maximum number of requests in flight; further ones wait before they are sent. 0: no limit.",
    )
    goodput: tuple[str, ...] = knob(
        default=(),
        unit="objectives",
        help="Latency objective as NAME:MILLISECONDS, for ttft, tpot or latency; goodput counts the requests "
        "that meet all objectives.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
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
    """A server to measure instead of an engine started by the benchmark."""

    base_url: str = knob(
        default="",
        help="Measure a running OpenAI-compatible server at this URL, such as http://127.0.0.1:8000/v1. "
        "MODEL is then used for its tokenizer only. Empty: start an engine.",
    )
    served_model_name: str = knob(
        default="", help="Model name to request from that server. Empty: the first that it lists."
    )
    api_key: str = knob(default="", help="Bearer token for that server. Empty: none.")

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.base_url:
            for flag, value in (("served-model-name", self.served_model_name), ("api-key", self.api_key)):
                if value:
                    raise ConfigError(f"--{flag} is for a server, so it needs --base-url")
        elif not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url is {self.base_url!r}; it must begin with http:// or https://")


@config
class LatencyConfig:
    """One batch that is run repeatedly."""

    batch_size: PositiveInt = knob(default=8, unit="requests", help="Number of requests in the batch.")
    input_len: PositiveInt = knob(default=32, unit="tokens", help="Length of each prompt.")
    output_len: PositiveInt = knob(default=128, unit="tokens", help="Length of each output.")
    repeats: PositiveInt = knob(default=10, unit="runs", help="Number of measured runs of the batch.")
    warmup: NonNegativeInt = knob(
        default=2, unit="runs", help="Number of warm-up runs, which are not measured."
    )
    seed: NonNegativeInt = knob(default=0, help="Seed for the tokens.")

    def __post_init__(self) -> None:
        check_limits(self)

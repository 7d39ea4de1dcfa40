"""The shard of a model on a rank under tensor parallelism (Shoeybi et al. 2019, Megatron-LM).

Attention is divided by heads, feed-forward layers by their inner features, embedding and output layer by the
vocabulary. Norms and routers are small, and every rank has them whole.
"""

from __future__ import annotations

import dataclasses
import math

from quire.errors import ConfigError
from quire.models.config import ModelConfig
from quire.models.layer import LayerConfig

_UNITS = (128, 64, 32, 1)
"""Shares are multiples of the first of these that allows it: groups of quantized weights then stay whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` parts of a model: that of rank `rank`, from 0."""

    rank: int = 0
    size: int = 1

    def share(self, count: int) -> range:
        """Return this rank's numbers out of `range(count)`: runs in the order of the ranks, about equal."""
        unit = next(unit for unit in _UNITS if unit == 1 or (not count % unit and count // unit >= self.size))
        units = count // unit
        return range(unit * (units * self.rank // self.size), unit * (units * (self.rank + 1) // self.size))

    def query_heads(self, num_heads: int) -> range:
        """Return this rank's query heads of `num_heads`."""
        count = num_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
        """Return the KV heads that this rank holds, one for each run of equally many of its query heads.

        A head that the query heads of several ranks need is held by each of them. If a rank's query heads do
        not begin or end with a group, runs are shorter than groups, and a rank holds a head more than once.
        """
        heads = self.query_heads(num_heads)
        group = num_heads // num_kv_heads
        return tuple(head // group for head in heads[:: math.gcd(group, len(heads))])

    def counted_kv_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
        """Return which of `kv_heads`, by their index here, no lower rank and no lower index holds."""
        lower = (Shard(rank, self.size).kv_heads(num_heads, num_kv_heads) for rank in range(self.rank))
        seen = {head for heads in lower for head in heads}
        held = self.kv_heads(num_heads, num_kv_heads)
        return tuple(i for i, head in enumerate(held) if head not in seen and head not in held[:i])

    def model(self, config: ModelConfig) -> ModelConfig:
        """Return the decoder that this rank computes: `config` with its share of each layer.

        The vocabulary stays whole, since the numbers of tokens do.
        """
        if self.size == 1:
            return config
        layers = tuple(
            LayerConfig(tuple(part.on_rank(self) for part in layer.parts)) for layer in config.layers
        )
        return dataclasses.replace(config, layers=layers)


WHOLE = Shard()
"""The only part of a model that is not divided."""


def check_divisible(config: ModelConfig, size: int) -> None:
    """Check that a model can be divided among `size` ranks.

    Raises:
        ConfigError: it cannot; the message has the sizes that are possible.
    """
    parts = dict.fromkeys(config.parts)
    for part in parts:
        part.check_divisible(size)
    weights = (weight for part in parts for weight in part.weights(config.hidden_size, {}, WHOLE))
    smallest = min([config.vocab_size, *(length for weight in weights for length, _ in weight.sections)])
    if smallest < size:
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, but the smallest matrix of this model has only "
            f"{smallest} features or tokens; lower it to that"
        )


def check_kv_divisible(config: ModelConfig, size: int) -> None:
    """Check that each KV head of a model is on one of `size` ranks only: so it can be shared with others.

    Raises:
        ConfigError: it is not; the message has the sizes that are possible.
    """
    counts = {spec.num_kv_heads for spec in config.kv_specs}
    odd = sorted(count for count in counts if count % size)
    if odd:
        possible = [str(n) for n in range(1, min(counts) + 1) if not any(count % n for count in counts)]
        raise ConfigError(
            f"EngineConfig.tensor_parallel_size is {size}, which does not divide the {odd[0]} KV heads of "
            "this model, as sharing KV with other engines requires (EngineConfig.role, "
            f"kv_peers, kv_transfer_port); set it to {', '.join(possible)}"
        )

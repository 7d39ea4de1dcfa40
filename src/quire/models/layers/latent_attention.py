"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2), over a cache of latents.

A token keeps one vector for all heads: the rotated part of its key, which heads share, and the normalized
latent from which a head's other key features and its values are made. Both matrices are absorbed: queries are
taken to the latent's space, and attended latents from there to a head's values. So attention has one KV head,
whose keys are its values, in prefill and decode alike, and a token's bits do not depend on how it was
scheduled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from quire.kv.cache.page_layout import KVLayerSpec
from quire.models.layer import LayerLoader, LayerWeight, Step, SubLayer
from quire.models.layers.attention import AttentionConfig, head_section, whole_section
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

_NORM_EPS = 1e-6  # of the latents' norms, whatever the model's other norms have


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """The numbers of one layer's latent attention, by their names in config.json.

    `num_kv_heads` and `head_dim` are those of the cache, and follow from the others.
    """

    q_lora_rank: int = 0  # features of the queries' latent; 0: queries are made of the hidden states
    kv_lora_rank: int = 0  # features of the latent that is kept
    qk_nope_head_dim: int = 0  # features of a head of queries and keys that are not rotated
    qk_rope_head_dim: int = 0  # and that are
    v_head_dim: int = 0  # features of a head of values

    weight_names: ClassVar[Mapping[str, str]] = {
        "q": "self_attn.q_proj",
        "q_a": "self_attn.q_a_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "kv_b": "self_attn.kv_b_proj",
        "o": "self_attn.o_proj",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", 1)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim + self.kv_lora_rank)

    @property
    def qk_head_dim(self) -> int:
        """Features of a head of queries."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    @override
    def output_size(self) -> int:
        return self.num_heads * self.v_head_dim

    @property
    @override
    def kv(self) -> KVLayerSpec:
        return KVLayerSpec(1, self.head_dim, 0, self.window)

    @override
    def weights(self, hidden_size: int, names: Mapping[str, str], shard: Shard) -> Iterator[LayerWeight]:
        heads = shard.query_heads(self.num_heads)
        query, values = (
            head_section(self.num_heads, size, heads) for size in (self.qk_head_dim, self.v_head_dim)
        )
        up = head_section(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, heads)
        first, name = (whole_section(self.q_lora_rank), "q_a") if self.q_lora_rank else (query, "q")
        latent = whole_section(self.head_dim)
        down = ((f"{name}.weight", (first[0], hidden_size)), ("kv_a.weight", (latent[0], hidden_size)))
        yield LayerWeight("latents", down, sections=(first, latent), is_quantized=True)
        if self.q_lora_rank:
            yield LayerWeight("q_a_norm", (("q_a_norm.weight", (self.q_lora_rank,)),))
            q_b = (("q_b.weight", (query[0], self.q_lora_rank)),)
            yield LayerWeight("queries", q_b, sections=(query,), is_quantized=True)
        yield LayerWeight("kv_a_norm", (("kv_a_norm.weight", (self.kv_lora_rank,)),))
        yield LayerWeight("kv_b", (("kv_b.weight", (up[0], self.kv_lora_rank)),), sections=(up,))
        output = (("o.weight", (hidden_size, values[0])),)
        yield LayerWeight("attention_output", output, axis=1, sections=(values,), is_quantized=True)

    @override
    def buffers(self) -> dict[str, tuple[int, ...]]:
        queries = self.num_heads * self.qk_head_dim
        return {
            "latents": ((self.q_lora_rank or queries) + self.head_dim,),
            "queries": (queries if self.q_lora_rank else 0,),
            "qkv": ((self.num_heads + 1) * self.head_dim,),
            "attended": (self.num_heads, self.head_dim),
            "values": (self.num_heads, self.v_head_dim),
        }

    @override
    def load(self, loader: LayerLoader) -> SubLayer:
        return LatentAttention(self, loader)


class LatentAttention(SubLayer):
    """Latent attention with its weights.

    The matrices between a head and the latent are held in the model's type, whatever others are.

    Args:
        whole: of all ranks.
        loader: of the layer.
    """

    def __init__(self, whole: LatentAttentionConfig, loader: LayerLoader) -> None:
        from quire.kernels.attention.tiles import HeadLayout

        config = whole.on_rank(loader.shard)
        super().__init__(config, loader)
        self._config = config
        self._kernels = loader.kernels
        self._kv_layer = loader.index
        self._rope = None if config.rope is None else loader.ropes.index(config.rope)
        self._heads = HeadLayout(config.num_heads, 1, config.head_dim, value_dim=0)
        self.latents = loader.linear("latents")
        self.queries = loader.linear("queries") if config.q_lora_rank else None
        self._q_norm, self._kv_norm = loader.norm("q_a_norm"), loader.norm("kv_a_norm")
        absorbed = loader.linears("kv_b", self._absorbed)
        self.to_latents, self.to_values = absorbed[::2], absorbed[1::2]
        self.output = loader.linear("attention_output", is_summed=True)

    def _absorbed(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield, for each head, what takes queries to the latent's space, and attended latents to values."""
        config = self._config
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        for head in weight.view(config.num_heads, -1, config.kv_lora_rank):
            keys, values = head.split(sizes)
            yield keys.t()
            yield values

    @property
    @override
    def kind(self) -> Hashable:
        queries = None if self.queries is None else self.queries.kind
        linears = self.latents.kind, queries, self.to_latents[0].kind, self.to_values[0].kind
        return type(self), self._config, self._rope, linears, self.output.kind

    @override
    def forward(
        self, inputs: torch.Tensor, step: Step, buffers: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        config, kernels, kv = self._config, self._kernels, step.kv[self._kv_layer]
        batch, rotated = step.batches[kv.group], config.qk_rope_head_dim
        cos, sin = (None, None) if self._rope is None else step.angles[self._rope]
        latents = self.latents(inputs, out=buffers["latents"])
        queries, latent = latents[:, : -config.head_dim], latents[:, -config.head_dim :]
        if self.queries is not None:
            assert self._q_norm is not None
            kernels.rms_norm(queries, self._q_norm, eps=_NORM_EPS, out=queries)
            queries = self.queries(queries, out=buffers["queries"])
        queries = queries.view(-1, config.num_heads, config.qk_head_dim)
        states = buffers["qkv"].view(-1, config.num_heads + 1, config.head_dim)  # queries, and the key
        self._take_rotated(queries[:, :, config.qk_nope_head_dim :], states[:, :-1, :rotated])
        self._take_rotated(latent[:, config.kv_lora_rank :], states[:, -1, :rotated])
        assert self._kv_norm is not None
        latent = latent[:, : config.kv_lora_rank]
        kernels.rms_norm(latent, self._kv_norm, eps=_NORM_EPS, out=states[:, -1, rotated:])
        for head, to_latents in enumerate(self.to_latents):
            to_latents(queries[:, head, : config.qk_nope_head_dim], out=states[:, head, rotated:])
        query = kernels.rotary_and_write_kv(
            buffers["qkv"],
            kv,
            batch,
            heads=self._heads,
            cos=cos,
            sin=sin,
            q_norm=None,
            k_norm=None,
            eps=_NORM_EPS,
        )
        attended = kernels.paged_attention(
            query,
            kv,
            batch,
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            out=buffers["attended"],
        )
        values = buffers["values"]
        for head, to_values in enumerate(self.to_values):
            to_values(attended[:, head, rotated:], out=values[:, head])
        return self.output(values.flatten(1), out=out)

    def _take_rotated(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy features that will be rotated [..., n], so that feature i is paired with feature i + n / 2."""
        if self._config.is_interleaved:
            source = source.view(*source.shape[:-1], -1, 2).transpose(-1, -2)
            to = to.view(*to.shape[:-1], 2, -1)
        to.copy_(source)

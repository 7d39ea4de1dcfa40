"""The network of `mini` for training: the Qwen3 decoder, with Hugging Face's parameter names.

Because the names are the same, `state_dict()` is the content of model.safetensors.  Shapes: B sequences,
T tokens, H hidden size, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARED_COMPONENT = 1.0  # of every embedding; the other components start with a standard deviation of 0.1
LOOK_BACK_PAIRS = 5  # fastest rotary pairs, which distinguish neighbouring positions
LOOK_BACK_SHARPNESS = 2.0  # weights of the query and key norms; the logits grow with their product


@dataclass(frozen=True)
class MiniConfig:
    """Sizes of the network; the fields are named as in Hugging Face's config.json."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    # With a large base, half of the rotary pairs hardly rotate over 1,500 tokens: they match content at any
    # distance.
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def to_hf(self) -> dict:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }


def rotary_table(config: MiniConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, D] of the rotary position embedding, both halves alike."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponent)
    return torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((angles.sin(),) * 2, dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, heads, T, D] by their position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] in any type; computed in float32, returned in the type of x."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and normalised queries and keys."""

    def __init__(self, c: MiniConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        c, (b, t, _) = self.c, x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, -1, c.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, -1, c.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, c.head_dim).transpose(1, 2)
        groups = c.num_attention_heads // c.num_key_value_heads
        q = rotate(q, cos, sin).to(v.dtype)
        k = rotate(k, cos, sin).to(v.dtype).repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v.repeat_interleave(groups, dim=1), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, c: MiniConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: MiniConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, c: MiniConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """ids [B, T] -> hidden states [B, T, H]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Mini(nn.Module):
    """The whole model; the output matrix is the embedding matrix."""

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rotary_table(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; matrices that write to the residual stream start smaller, by depth."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 0.1 if "embed" in name else p.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * self.config.num_hidden_layers) ** -0.5
            nn.init.normal_(p, std=std)
        self._initialise_look_back()

    @torch.no_grad()
    def _initialise_look_back(self) -> None:
        """Initialize the heads of the first layer to attend 1, 2, 3, ... tokens back.

        All embeddings share one large component, from which the queries and keys of that layer compute fixed
        vectors whose rotary product is greatest at the head's distance.  Finding a repeated name needs such
        heads, and a small model takes long to learn them (short convolutions serve the same purpose, Arora
        et al. 2023, "Zoology").  Training can change them.
        """
        c, attention = self.config, self.model.layers[0].self_attn
        self.model.embed_tokens.weight[:, 0] = SHARED_COMPONENT
        pairs = torch.arange(LOOK_BACK_PAIRS)
        frequency = c.rope_theta ** (-2.0 * pairs / c.head_dim)
        for projection in (attention.q_proj, attention.k_proj):
            weight = projection.weight.mul_(0.1)
            for head in range(weight.shape[0] // c.head_dim):
                distance = head + 1 if projection is attention.q_proj else 0
                rows = head * c.head_dim + pairs
                weight[rows, 0] = torch.cos(-distance * frequency)
                weight[rows + c.head_dim // 2, 0] = torch.sin(-distance * frequency)
        attention.q_norm.weight.fill_(LOOK_BACK_SHARPNESS)
        attention.k_norm.weight.fill_(LOOK_BACK_SHARPNESS)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, H] of ids [B, T]."""
        t = ids.shape[1]
        return self.model(ids, self.cos[:t], self.sin[:t])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

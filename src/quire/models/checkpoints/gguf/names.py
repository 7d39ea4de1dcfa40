"""Tensor names in GGUF files, by the names in Hugging Face's format."""

from __future__ import annotations

_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PREFIX = "model.layers."


def gguf_name(name: str) -> str:
    """Return `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        KeyError: no supported architecture has such a tensor.
    """
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{kind}"

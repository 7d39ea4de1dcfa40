"""Tensor names in safetensors files, by Quire's families. Nothing here needs torch."""

from __future__ import annotations

_BODY = "model."
_PARTS_OF_BODY = ("embed_tokens.", "layers.", "norm.")


def published_name(stored: str) -> str:
    """Return a tensor's name in a whole model, such as `model.norm.weight` for `norm.weight`.

    Files may hold a model's body as it is saved by itself; `transformers` adds and removes the prefix, too.
    """
    if stored.startswith(_PARTS_OF_BODY):
        return _BODY + stored
    return stored.removeprefix(_BODY) if stored.startswith(f"{_BODY}lm_head.") else stored

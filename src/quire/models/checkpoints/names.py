"""Tensor names in safetensors files, by Quire's families. Nothing here needs torch."""

from __future__ import annotations

import re

_BODY = "model."
_PARTS_OF_BODY = ("embed_tokens.", "layers.", "norm.")
_DECODER = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
_OTHER_PART = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline|audio_tower)\b"
)


def published_name(stored: str) -> str:
    """Return a tensor's name in a whole model, such as `model.norm.weight` for `norm.weight`.

    Files may hold a model's body as it is saved by itself, and the decoder of a multimodal model has one of
    several prefixes; `transformers` adds and removes them, too.
    """
    stored = _DECODER.sub("", stored, count=1) if _DECODER.match(stored) else stored
    if stored.startswith(_PARTS_OF_BODY):
        return _BODY + stored
    return stored.removeprefix(_BODY) if stored.startswith(f"{_BODY}lm_head.") else stored


def is_of_other_part(stored: str) -> bool:
    """Return whether a tensor of a multimodal model belongs to its vision or audio."""
    return _OTHER_PART.match(stored) is not None

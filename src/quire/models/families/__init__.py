"""The families by name and by architecture; `quire.models.reading` reads a config.json by them."""

from __future__ import annotations

from quire.models.families import (
    cohere,
    deepseek,
    dense,
    ernie,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mamba,
    minimax,
    neox,
    olmo,
    phi,
    qwen,
)
from quire.models.families.family import Family

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **granite.FAMILIES,
    **mamba.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **phi.FAMILIES,
    **glm.FAMILIES,
    **olmo.FAMILIES,
    **ernie.FAMILIES,
    **cohere.FAMILIES,
    **minimax.FAMILIES,
    **dense.FAMILIES,
    **deepseek.FAMILIES,
    **lfm2.FAMILIES,
    **gpt_oss.FAMILIES,
    **neox.FAMILIES,
    **gpt2.FAMILIES,
}

ARCHITECTURES: dict[str, str] = {
    architecture: name for name, family in FAMILIES.items() for architecture in family.architectures
}

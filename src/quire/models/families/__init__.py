"""The families by name and by architecture; `quire.models.reading` reads a config.json by them."""

from __future__ import annotations

from quire.models.families import (
    bert,
    deepseek,
    dense,
    experts,
    gemma,
    gpt,
    granite,
    interleaved,
    lfm2,
    llama,
    mamba,
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
    **interleaved.FAMILIES,
    **olmo.FAMILIES,
    **experts.FAMILIES,
    **dense.FAMILIES,
    **deepseek.FAMILIES,
    **lfm2.FAMILIES,
    **gpt.FAMILIES,
    **bert.FAMILIES,
}

ARCHITECTURES: dict[str, str] = {
    architecture: name for name, family in FAMILIES.items() for architecture in family.architectures
}

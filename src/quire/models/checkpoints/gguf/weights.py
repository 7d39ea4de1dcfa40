"""The weights of a GGUF file.

Each tensor becomes the form that the kernels can hold: Q2_K, Q3_K and types of 4 evenly spaced bits are int4
in groups of 16 or 32, Q5_0 and Q6_K int6, MXFP4 stays what it is, and all other quantized types are 8 bits in
such groups.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from quire.errors import ModelError
from quire.kernels.layers.weights import BlockWeight, Weight, dequantize, part_of, with_tensors
from quire.models.checkpoints.gguf.architectures import architecture_of
from quire.models.checkpoints.gguf.blocks import KINDS, Kind
from quire.models.checkpoints.gguf.config import ROPE_TENSORS, num_draft_layers
from quire.models.checkpoints.gguf.file import TensorInfo, num_bytes, read_gguf
from quire.models.checkpoints.gguf.tensor_names import fused_tensor
from quire.models.checkpoints.mapped_files import drop_pages
from quire.models.embedding import EncodedRows

_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")
_OF_LATENTS = "attn_kv_b.weight"
_VALUE_HEADS = {  # axis, whether a head is one number, and whether it comes behind queries and keys
    "attn_qkv.weight": (0, False, True),
    "attn_gate.weight": (0, False, False),
    "ssm_conv1d.weight": (0, False, True),
    "ssm_beta.weight": (0, True, False),
    "ssm_alpha.weight": (0, True, False),
    "ssm_a": (0, True, False),
    "ssm_dt.bias": (0, True, False),
    "ssm_out.weight": (1, False, False),
}


class GGUFWeights:
    """See `quire.models.checkpoints.checkpoint.WeightStore`.

    Args:
        path: the file, or the first of several.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self._architecture = architecture_of(self._file.metadata, path)
        self._num_layers = (self._entry("block_count") or 0) - num_draft_layers(self._file)

    def close(self) -> None:
        """See `WeightStore`. The mapping lives as long as its tensors."""

    def names(self) -> Set[str]:
        """See `WeightStore`."""
        return self._file.tensors.keys()

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See `WeightStore`."""
        return self._halves(name) or (self._place(name)[0],)

    def is_ignored(self, name: str) -> bool:
        """See `WeightStore`: rotary factors are read with the config; layers that draft are passed over.

        So are keys and values of layers that read those of others.
        """
        if name in ROPE_TENSORS:
            return True
        layer = _LAYER.match(name)
        if layer is None:
            return False
        first_shared = self._num_layers - (self._entry("attention.shared_kv_layers") or 0)
        is_kv = name[layer.end() :].startswith(("attn_k", "attn_v"))
        return int(layer[1]) >= (first_shared if is_kv else self._num_layers)

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """See `WeightStore`."""
        stored, _ = self._architecture.tensor(name)
        halves = self._halves(name)
        if halves:
            return self._of_latents(halves, shape)
        return self._as_published(stored, self._decoded(stored, self._info(name), shape))

    def encoded_embedding(self, name: str, shape: tuple[int, ...]) -> EncodedRows | None:
        """See `WeightStore`."""
        stored, _ = self._architecture.tensor(name)
        kind, octets = self._blocks(stored, self._info(name), shape)
        return None if kind.block_size == 1 else EncodedRows(octets, kind.floats)

    def is_packed_quickly(self, block_kinds: Set[str]) -> bool:
        """See `WeightStore`."""
        kinds = {KINDS[info.kind] for info in self._file.tensors.values()}
        return all(kind.block_size == 1 or kind.name in block_kinds for kind in kinds)

    def release(self, name: str) -> None:
        """See `WeightStore`."""
        halves = [self._file.tensors[half] for half in self._halves(name)]
        for info in halves or [self._info(name)]:
            drop_pages(self._bytes(info))

    def _halves(self, name: str) -> tuple[str, ...]:
        """Return the tensors that hold what makes keys and values of latents, if not in one; else none."""
        stored, _ = self._architecture.tensor(name)
        if not stored.endswith(_OF_LATENTS) or stored in self._file.tensors:
            return ()
        layer = stored.removesuffix(_OF_LATENTS)
        return f"{layer}attn_k_b.weight", f"{layer}attn_v_b.weight"

    def _of_latents(self, halves: tuple[str, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return [heads * (key + value), latent] of [heads, latent, key] and [heads, value, latent]."""
        heads, latent = self._entry("attention.head_count"), shape[1]
        keys, values = (self._file.tensors[half] for half in halves)
        if (
            len(keys.shape) != 3
            or len(values.shape) != 3
            or heads * (keys.shape[2] + values.shape[1]) != shape[0]
        ):
            raise ModelError(
                f"{' and '.join(halves)} in {self._file.path} have shapes {list(keys.shape)} and "
                f"{list(values.shape)}; the metadata ask for {list(shape)} of both"
            )
        shapes = (heads, latent, keys.shape[2]), (heads, values.shape[1], latent)
        keys_of, values_of = (
            dequantize(self._decoded(half, self._file.tensors[half], wanted)).view(wanted)
            for half, wanted in zip(halves, shapes, strict=True)
        )
        return torch.cat((keys_of.transpose(1, 2), values_of), dim=1).view(shape)

    def _decoded(self, stored: str, info: TensorInfo, shape: tuple[int, ...]) -> Weight:
        kind, octets = self._blocks(stored, info, shape)

        def decode(octets: torch.Tensor) -> Weight:
            try:
                return kind.decode(octets)
            except ValueError as error:
                raise ModelError(f"{stored} in {self._file.path} cannot be read: {error}") from error

        if kind.groups is not None:
            is_mxfp4 = kind.name == "MXFP4"
            return BlockWeight(octets, kind.name, kind.block_size, *kind.groups, is_mxfp4, decode)
        weight = decode(octets)
        return weight.view(shape) if isinstance(weight, torch.Tensor) else weight

    def _blocks(self, stored: str, info: TensorInfo, shape: tuple[int, ...]) -> tuple[Kind, torch.Tensor]:
        """Return the kind of a weight, and its bytes [rows, blocks, block_bytes]."""
        if _without_ones(info.shape) != _without_ones(shape):
            raise ModelError(
                f"{stored} in {self._file.path} has shape {list(info.shape)}; its metadata ask for "
                f"{list(shape)}"
            )
        kind = KINDS[info.kind]
        return kind, self._bytes(info).view(math.prod(shape[:-1]), -1, kind.block_bytes)

    def _info(self, name: str) -> TensorInfo:
        """Return where a weight lies: a tensor, one expert's part of it, or a half of that."""
        stored, expert, half = self._place(name)
        info = self._file.tensors[stored]
        if stored.endswith("ssm_norm.weight"):  # a group in each row
            return dataclasses.replace(info, shape=(math.prod(info.shape),))
        if expert is None:
            return info
        if len(info.shape) < 2 or expert >= info.shape[0]:
            raise ModelError(
                f"{stored} in {self._file.path} has shape {list(info.shape)}; its metadata ask for more than "
                f"{expert} experts"
            )
        part = dataclasses.replace(info, shape=info.shape[1:])
        start = info.start + expert * num_bytes(part)
        if half is not None:
            part = dataclasses.replace(part, shape=(part.shape[0] // 2, *part.shape[1:]))
            start += half * num_bytes(part)
        return dataclasses.replace(part, start=start)

    def _place(self, name: str) -> tuple[str, int | None, int | None]:
        """Return the tensor that holds a weight, which expert's part of it, and which half of that."""
        stored, expert = self._architecture.tensor(name)
        fused = None if stored in self._file.tensors else fused_tensor(stored)
        if fused is None or fused[0] not in self._file.tensors:
            return stored, expert, None
        return fused[0], expert, fused[1]

    def _bytes(self, info: TensorInfo) -> torch.Tensor:
        return torch.frombuffer(info.data, dtype=torch.uint8, offset=info.start, count=num_bytes(info))

    def _as_published(self, name: str, weight: Weight) -> Weight:
        """Undo changes of llama.cpp's conversion in some architectures."""
        kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if (
            self._architecture.norms_include_offset
            and kind.endswith("norm.weight")
            and kind != "ssm_norm.weight"
        ):
            assert isinstance(weight, torch.Tensor)
            return weight.float() - 1.0
        if self._architecture.has_adjacent_pairs and kind.startswith(("attn_q.", "attn_k.")):
            head_dim = self._entry("attention.key_length") or (
                self._entry("embedding_length") // self._entry("attention.head_count")
            )
            return with_tensors(weight, lambda rows: _deinterleave(rows, head_dim))
        if kind == "ssm_a":
            assert isinstance(weight, torch.Tensor)
            weight = (-weight).log()
        if self._architecture.tiles_value_heads and kind in _VALUE_HEADS:
            return self._with_value_heads_in_order(weight, *_VALUE_HEADS[kind])
        return weight

    def _with_value_heads_in_order(
        self, weight: Weight, axis: int, of_one: bool, behind_keys: bool
    ) -> Weight:
        """Reorder the value heads of a DeltaNet so that those of one key head are side by side.

        Args:
            weight: the weight.
            axis: along which the heads lie.
            of_one: a head has one number there, not its features.
            behind_keys: queries and keys come first.
        """
        num_keys, num_values = self._entry("ssm.group_count"), self._entry("ssm.time_step_rank")
        size = 1 if of_one else self._entry("ssm.inner_size") // num_values
        start = 2 * num_keys * self._entry("ssm.state_size") if behind_keys else 0
        order = [head for key in range(num_keys) for head in range(key, num_values, num_keys)]
        heads = [range(start + head * size, start + (head + 1) * size) for head in order]
        return part_of(weight, axis, [range(start), *heads] if start else heads)

    def _entry(self, key: str) -> Any:
        metadata = self._file.metadata
        return metadata.get(f"{metadata['general.architecture']}.{key}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without sizes of 1: files have fewer of them, as of a convolution's only channel."""
    return tuple(size for size in shape if size != 1)


def _deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

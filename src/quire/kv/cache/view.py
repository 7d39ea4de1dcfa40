"""One layer of a paged KV cache: what the kernels read and write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.reference import write_kv
from quire.kv.cache.field_checks import is_whole
from quire.kv.cache.head_sharding import PagesSharding
from quire.kv.cache.metadata import PagedAttentionCacheMetaData
from quire.kv.cache.page_memory import (
    PageMemory,
    layout_of,
    page_quantizer,
    quantizer_name,
    quantizer_of_name,
)
from quire.kv.cache.plain_data import check_keys
from quire.kv.cache.saved_tensors import TensorData, load_tensors, save_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from quire.kernels.attention.kv_quantizers import PageQuantizer
    from quire.kv.cache.step_metadata import PagedAttentionMetadata, TokenRows


class PagedAttentionCacheView(TensorData):
    """Keys and values of one layer, in pages.

    Without pages the view is uninitialized: it says what the layer is, and a use of its pages raises
    AttributeError. So is the view of a layer that has no KV.

    Args:
        metadata: metadata of the cache.
        layer_index: number of the layer.
        key_pages: (num_kv_heads, num_pages, page_size, head_dim), a tensor, or an array of numpy, whose
            memory is then that of the view. Places that were never written may hold anything.
        value_pages: likewise; of a layer whose keys are its values, `key_pages` themselves.
        kv_pages_sharding: how the pages are divided among devices; None: as `metadata` says.
        key_scales: (num_kv_heads, num_pages, page_size, ...) of a quantizer that has scales.
        value_scales: likewise.
        quantizer: makes the pages' numbers out of keys and values; None: that of the cache's type, int8 or
            float8_e4m3fn, or else they are rounded to the pages' type.

    Raises:
        ValueError: there is no such layer; pages or scales have another shape or type than `metadata` and the
            quantizer say, or are missing; or pages cannot be divided so.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    quantizer: PageQuantizer | None
    handles: dict[str, Any]
    group = 0

    def __init__(
        self,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        key_pages: torch.Tensor | npt.NDArray[Any] | None = None,
        value_pages: torch.Tensor | npt.NDArray[Any] | None = None,
        kv_pages_sharding: PagesSharding | None = None,
        *,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
        quantizer: PageQuantizer | None = None,
    ) -> None:
        if not is_whole(layer_index) or not 0 <= layer_index < metadata.num_hidden_layers:
            raise ValueError(
                f"layer_index is {layer_index!r}; the cache has layers 0 to {metadata.num_hidden_layers - 1}"
            )
        self.metadata = metadata
        self.layer_index = int(layer_index)
        on_devices = metadata.sharded_over(None, kv_pages_sharding)
        self.kv_pages_sharding = kv_pages_sharding or on_devices.pages_sharding(self.layer_index)
        self.quantizer = page_quantizer(metadata.dtype, quantizer)
        self.key_scales, self.value_scales = None, None
        self.handles = {}
        given = {
            "key_pages": key_pages,
            "value_pages": value_pages,
            "key_scales": key_scales,
            "value_scales": value_scales,
        }
        if any(tensor is not None for tensor in given.values()):
            expected = self._expected_tensors(on_devices)
            for name, tensor in given.items():
                setattr(self, name, _checked(name, tensor, expected.get(name), self.layer_index))

    def _expected_tensors(
        self, on_devices: PagedAttentionCacheMetaData
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and type of each tensor that the layer has on one device."""
        layout = layout_of(on_devices.of_layer(self.layer_index), self.quantizer).layers[0]
        if layout is None:
            return {}
        expected: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, heads in (("key", layout.keys), ("value", layout.values)):
            places = (heads.num_heads, self.metadata.num_pages_per_layer, self.metadata.page_size)
            vector = heads.format
            expected[f"{name}_pages"] = (*places, vector.num_numbers), vector.dtype
            if vector.scale_dtype:
                expected[f"{name}_scales"] = (*places, *vector.scale_shape), vector.scale_dtype
        return expected

    @classmethod
    def init(
        cls,
        mesh: DeviceMesh | None,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        quantizer: object | None = None,
        kv_pages_sharding: PagesSharding | None = None,
    ) -> Self:
        """Return a view of one layer with pages of its own.

        Args:
            mesh: as for `PagedAttentionCache.init_cache`.
            metadata: metadata of the cache.
            layer_index: number of the layer.
            quantizer: as for `PagedAttentionCache.init_cache`.
            kv_pages_sharding: as for `PagedAttentionCache.init_cache`.

        Raises:
            ValueError: as `PagedAttentionCache.init_cache` does.
        """
        metadata = metadata.sharded_over(mesh, kv_pages_sharding)
        own = page_quantizer(metadata.dtype, quantizer)
        return cls.over(PageMemory(metadata.of_layer(layer_index), own), metadata, layer_index, own)

    @classmethod
    def over(
        cls,
        memory: PageMemory,
        metadata: PagedAttentionCacheMetaData,
        layer_index: int,
        quantizer: PageQuantizer | None,
    ) -> Self:
        """Return the view of a layer over memory that has all layers, or only this one."""
        layers = memory.layout.layers
        layout = layers[layer_index if len(layers) > 1 else 0]
        if layout is None:
            return cls(metadata, layer_index)
        parts = [(memory.numbers(part), memory.scales(part)) for part in layout.parts]
        (keys, key_scales), (values, value_scales) = parts[0], parts[-1]
        return cls(
            metadata,
            layer_index,
            keys,
            values,
            key_scales=key_scales,
            value_scales=value_scales,
            quantizer=quantizer,
        )

    def concatenate_to_cache(
        self, key: torch.Tensor, value: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> Self:
        """Write a step's keys and values to their places, prompts and generated tokens alike, in place.

        Nothing is written unless everything can be.

        Args:
            key: [tokens, num_kv_heads, head_dim], the rows of `metadata.prefill_pos` and then those of
                `metadata.generate_pos`; the heads are those that this device has.
            value: likewise.
            metadata: the step's tables.

        Returns:
            The view itself.

        Raises:
            ValueError: the tables contradict each other, name no page for a token, or have another number of
                rows than `key` and `value`; or these have other heads or head sizes than the layer.
        """
        return self._write(key, value, metadata.prefill_rows(), metadata.generate_rows())

    def write_prefill_to_cache(
        self, key: torch.Tensor, value: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> Self:
        """Write the prompts' part of a step, as `concatenate_to_cache` does.

        Args:
            key: [tokens, num_kv_heads, head_dim], the rows of `metadata.prefill_pos` only.
            value: likewise.
            metadata: the step's tables.

        Returns:
            The view itself.

        Raises:
            ValueError: as `concatenate_to_cache` does.
        """
        return self._write(key, value, metadata.prefill_rows())

    def write_generate_to_cache(
        self, key: torch.Tensor, value: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> Self:
        """Write the generated part of a step, as `concatenate_to_cache` does.

        Args:
            key: [tokens, num_kv_heads, head_dim], the rows of `metadata.generate_pos` only.
            value: likewise.
            metadata: the step's tables.

        Returns:
            The view itself.

        Raises:
            ValueError: as `concatenate_to_cache` does.
        """
        return self._write(key, value, metadata.generate_rows())

    def _check_states(self, key: torch.Tensor, value: torch.Tensor, num_rows: int) -> None:
        spec = self.metadata.layers[self.layer_index]
        num_heads = self.key_pages.shape[0]
        assert spec is not None
        for name, states, head_dim in (
            ("key", key, spec.key_head_dim),
            ("value", value, spec.value_head_dim),
        ):
            if states.shape != (num_rows, num_heads, head_dim):
                raise ValueError(
                    f"{name} is {list(states.shape)}; the step's tables and layer {self.layer_index} ask for "
                    f"{[num_rows, num_heads, head_dim]} (tokens, KV heads, features)"
                )

    def _batch(self, tokens: TokenRows) -> AttentionBatch:
        """Return a step's tokens as the engine's kernels take them."""
        page_size, num_pages = self.metadata.page_size, self.metadata.num_pages_per_layer
        first = tokens.num_computed_tokens // page_size
        end = -(-(tokens.num_computed_tokens + tokens.num_tokens) // page_size)
        width = tokens.page_tables.shape[1]
        column = np.arange(width)
        is_used = (column >= first[:, None]) & (column < end[:, None])
        is_page = (tokens.page_tables >= 0) & (tokens.page_tables < num_pages)
        wrong = np.argwhere(is_used & ~is_page)
        if (end > width).any() or wrong.size:
            row, place = wrong[0] if wrong.size else (int((end > width).argmax()), width)
            raise ValueError(
                f"{tokens.name}_page_table has no page for position {place * page_size} of sequence {row}; "
                f"the cache has pages 0 to {num_pages - 1} of {page_size} tokens"
            )
        return AttentionBatch.build(
            tokens.num_computed_tokens, tokens.num_tokens, tokens.page_tables, page_size
        )

    def _write(self, key: torch.Tensor, value: torch.Tensor, *parts: TokenRows) -> Self:
        """Write the rows of the parts, which follow each other, once all of them have been checked."""
        self._check_states(key, value, sum(part.num_rows for part in parts))
        batches = [self._batch(part) for part in parts]
        first = 0
        for part, batch in zip(parts, batches, strict=True):
            if len(part.rows):
                chosen = torch.from_numpy(first + part.rows)
                write_kv(key[chosen], value[chosen], self, batch)
            first += part.num_rows
        return self

    def replace(self, **kwargs: Any) -> Self:
        """Return a view with other arguments of the constructor."""
        return type(self)(**{**self._arguments(), **kwargs})

    def to_dict(self, tensors: str | Path | None = None) -> dict[str, Any]:
        """Return which layer of which cache this is, as plain data.

        Args:
            tensors: a safetensors file to write the pages to; None: they are left out.

        Raises:
            ValueError: tensors are asked for, and the view has none.
        """
        data = {
            "metadata": self.metadata.to_dict(),
            "layer_index": self.layer_index,
            "kv_pages_sharding": list(self.kv_pages_sharding),
            "quantizer": quantizer_name(self.quantizer),
        }
        if tensors is not None:
            if not self.is_initialized:
                raise ValueError(f"layer {self.layer_index} has no tensors to write to {tensors}")
            save_tensors(tensors, self._kept_tensors(), data)
        return data

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        tensors: str | Path | None = None,
        *,
        quantizer: object | None = None,
    ) -> Self:
        """Return the view that `to_dict` wrote down.

        Args:
            data: what `to_dict` returned.
            tensors: the file that it wrote, whose pages the view then has to itself; None: it is
                uninitialized.
            quantizer: the one that the view had, if it was none of Quire's.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a key is missing or unknown, a value is out of range, or file, data and quantizer
                belong to different views.
        """
        check_keys(cls.__name__, data, ["metadata", "layer_index", "kv_pages_sharding", "quantizer"])
        metadata = PagedAttentionCacheMetaData.from_dict(data["metadata"])
        layer_index = data["layer_index"]
        own = quantizer_of_name(data["quantizer"], quantizer)
        sharding = tuple(data["kv_pages_sharding"])
        bare = cls(metadata, layer_index, kv_pages_sharding=sharding, quantizer=own)
        if tensors is None:
            return bare
        view = cls.init(None, metadata, bare.layer_index, own, sharding)
        load_tensors(tensors, view._kept_tensors(), bare.to_dict())
        return view

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {
            name: getattr(self, name) for name in ("key_pages", "value_pages", "key_scales", "value_scales")
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _kept_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, those of keys once if they are the values, too."""
        tensors = self._tensors()
        if self.value_pages is not self.key_pages:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith("key")}

    def _arguments(self) -> dict[str, Any]:
        tensors = self._tensors() if self.is_initialized else {}
        return {
            "metadata": self.metadata,
            "layer_index": self.layer_index,
            "kv_pages_sharding": self.kv_pages_sharding,
            "quantizer": self.quantizer,
            **tensors,
        }

    @property
    def is_initialized(self) -> bool:
        """Whether the view has pages."""
        return "key_pages" in self.__dict__

    def __getattr__(self, name: str) -> NoReturn:
        """Say what is missing; called only for attributes that are not set."""
        if name in ("key_pages", "value_pages"):
            raise AttributeError(
                f"layer {self.layer_index} has no {name}: its view is uninitialized; "
                "PagedAttentionCache.init_cache() makes pages for each layer that has KV"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        pages = "Uninitialized"
        if self.is_initialized:
            pages = f"key_pages={tuple(self.key_pages.shape)}, value_pages={tuple(self.value_pages.shape)}"
        return f"{type(self).__name__}(layer_index={self.layer_index}, {pages})"


def _checked(
    name: str, tensor: object, expected: tuple[tuple[int, ...], str] | None, layer_index: int
) -> torch.Tensor | None:
    """Return a view's tensor if it is what the layer has; raise ValueError if not."""
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(tensor)
    found = tensor
    if isinstance(tensor, torch.Tensor):
        found = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if found == expected:
            return tensor
    if tensor is None and expected is None:
        return None
    raise ValueError(f"{name} is {found}; layer {layer_index} has {expected} (shape and type)")

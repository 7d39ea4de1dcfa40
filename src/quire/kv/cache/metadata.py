"""The sizes of a paged KV cache: its layers, its pages, and how many pages fit into memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from quire.kv.cache.field_checks import check_layer, check_positive, dtype_name, is_number, is_whole
from quire.kv.cache.head_sharding import (
    REPLICATED,
    PagesSharding,
    PartitionAxis,
    count_kv_head_shards,
    kv_head_axis_size,
)
from quire.kv.cache.memory_limits import memory_limit
from quire.kv.cache.page_layout import KVLayerSpec, PageLayout, VectorFormat, cache_format
from quire.kv.cache.plain_data import PlainData, check_keys, plain_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class PagedAttentionCacheMetaData(PlainData):
    """Sizes of a paged KV cache. `create`, `create_for_layers` and `for_layers` make and check one.

    A page is what the scheduler calls a block: the keys and values of `page_size` tokens, in all layers.

    Args:
        partition_axis: which mesh axis KV heads are divided over.
        dtype: of keys and values: float32, bfloat16, float16, float8_e4m3fn, or int8 with a float32 scale
            for each token and head.
        batch_size: sequences that are served at once.
        num_hidden_layers: layers, those without KV included.
        num_pages_per_layer: pages of the cache; each has room for every layer.
        num_pages_per_sequence: pages of the longest sequence.
        max_sequences: length of the longest sequence in tokens.
        page_size: tokens of a page.
        num_kv_heads: KV heads of a layer, over all devices; the most of any, where layers differ. 1 if none
            has KV.
        kv_head_dim_size: features of a head; the most of any, where layers or keys and values differ. 1 if
            none has KV.
        hbm_utilization: share of the device's memory that may be in use once the cache is there.
        hbm_bytes: bytes for the cache, over all devices that KV heads are divided among.
        layers: what each layer keeps; None: nothing. Left out: all have `num_kv_heads` keys and values of
            `kv_head_dim_size` features.
        kv_head_shards: devices along the mesh axis that KV heads are divided over.
    """

    partition_axis: PartitionAxis
    dtype: str
    batch_size: int
    num_hidden_layers: int
    num_pages_per_layer: int
    num_pages_per_sequence: int
    max_sequences: int
    page_size: int
    num_kv_heads: int
    kv_head_dim_size: int
    hbm_utilization: float
    hbm_bytes: float
    layers: tuple[KVLayerSpec | None, ...] = ()
    kv_head_shards: int = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in (*_POSITIVE, "num_pages_per_layer", "hbm_utilization", "hbm_bytes"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if self.hbm_bytes == int(self.hbm_bytes):
            object.__setattr__(self, "hbm_bytes", int(self.hbm_bytes))
        object.__setattr__(self, "layers", tuple(self.layers) or self._equal_layers())
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self._check_layers()

    @classmethod
    def create(  # noqa: PLR0917 - EasyDeL's signature
        cls,
        mesh: DeviceMesh | None,
        partition_axis: PartitionAxis,
        batch_size: int,
        num_hidden_layers: int,
        max_sequences: int,
        page_size: int,
        num_kv_heads: int,
        kv_head_dim_size: int,
        hbm_utilization: float,
        dtype: object = "bfloat16",
    ) -> Self:
        """Size a cache whose layers are all alike by the memory of its devices.

        Args:
            mesh: the devices; None: one.
            partition_axis: names the mesh axis that KV heads are divided over.
            batch_size: sequences that are served at once.
            num_hidden_layers: layers, each with keys and values.
            max_sequences: length of the longest sequence in tokens.
            page_size: tokens of a page.
            num_kv_heads: KV heads of each layer, over all devices.
            kv_head_dim_size: features of a head.
            hbm_utilization: share of each device's memory that may be in use once the cache is there.
            dtype: data type of keys and values, by name or as torch's or numpy's type.

        Raises:
            ValueError: a value is out of range, or no page fits; names field and value.
        """
        for name, value in (
            ("num_hidden_layers", num_hidden_layers),
            ("num_kv_heads", num_kv_heads),
            ("kv_head_dim_size", kv_head_dim_size),
        ):
            check_positive(name, value)
        spec = KVLayerSpec(num_kv_heads, kv_head_dim_size, kv_head_dim_size)
        return cls.create_for_layers(
            mesh,
            partition_axis,
            batch_size,
            (spec,) * int(num_hidden_layers),
            max_sequences,
            page_size,
            hbm_utilization,
            dtype,
        )

    @classmethod
    def create_for_layers(  # noqa: PLR0917 - `create` with other layers
        cls,
        mesh: DeviceMesh | None,
        partition_axis: PartitionAxis,
        batch_size: int,
        layers: Sequence[KVLayerSpec | None],
        max_sequences: int,
        page_size: int,
        hbm_utilization: float,
        dtype: object = "bfloat16",
    ) -> Self:
        """Size a cache by the memory of its devices, as `create` does, with a description of each layer.

        `layers` says what each layer keeps; None: nothing. The other arguments are those of `create`.

        Raises:
            ValueError: a value is out of range, or no page fits; names field and value.
        """
        check_positive("max_sequences", max_sequences)
        if not is_number(hbm_utilization) or not 0.0 < hbm_utilization < 1.0:
            raise ValueError(f"hbm_utilization is {hbm_utilization!r}; it must be above 0 and below 1")
        single = cls.for_layers(
            layers,
            page_size=page_size,
            dtype=dtype,
            num_pages=1,
            batch_size=batch_size,
            max_sequences=max_sequences,
            partition_axis=partition_axis,
            kv_head_shards=count_kv_head_shards(mesh, partition_axis, layers),
        )
        if not single.bytes_per_block:
            raise ValueError(f"layers is {list(layers)}; at least one layer must have keys and values")
        memory = memory_limit()
        per_device = int(memory.limit * float(hbm_utilization)) - memory.in_use
        num_pages = per_device // single.bytes_per_block
        if num_pages <= 0:
            tokens = max(0, per_device // single.bytes_per_token)
            raise ValueError(
                f"hbm_utilization {hbm_utilization} leaves {per_device:,} bytes for the KV cache: of the "
                f"limit of {memory.limit:,} bytes, {memory.in_use:,} are in use; a page of "
                f"{page_size} tokens takes {single.bytes_per_block:,}, so that the longest sequence "
                f"that fits has {tokens} tokens; raise hbm_utilization, or lower page_size to that length"
            )
        return single.replace(
            num_pages_per_layer=num_pages,
            hbm_utilization=hbm_utilization,
            hbm_bytes=per_device * single.num_sharing_devices,
        )

    @classmethod
    def for_layers(
        cls,
        layers: Sequence[KVLayerSpec | None],
        *,
        page_size: int,
        dtype: object,
        num_pages: int,
        batch_size: int = 1,
        max_sequences: int | None = None,
        partition_axis: PartitionAxis | None = None,
        kv_head_shards: int = 1,
    ) -> Self:
        """Describe a cache of a given number of pages.

        Args:
            layers: what each layer keeps; None: nothing.
            page_size: tokens of a page.
            dtype: data type of keys and values, by name or as torch's or numpy's type.
            num_pages: pages of the cache, 0 or more.
            batch_size: sequences that are served at once.
            max_sequences: length of the longest sequence in tokens; None: what the cache holds.
            partition_axis: names the mesh axis that KV heads are divided over; None: the usual name.
            kv_head_shards: devices along that axis.

        Raises:
            ValueError: a value is out of range; names field and value.
        """
        check_positive("page_size", page_size)
        page_size, num_pages = int(page_size), plain_number(num_pages)
        longest = max(1, num_pages * page_size) if max_sequences is None else plain_number(max_sequences)
        check_positive("max_sequences", longest)
        metadata = cls(
            partition_axis=partition_axis or PartitionAxis(),
            dtype=dtype_name(dtype),
            batch_size=batch_size,
            num_hidden_layers=len(layers),
            num_pages_per_layer=num_pages,
            num_pages_per_sequence=-(-longest // page_size),
            max_sequences=longest,
            page_size=page_size,
            **{"num_kv_heads": 1, "kv_head_dim_size": 1, **_most_of(layers)},
            hbm_utilization=1.0,
            hbm_bytes=0,
            layers=tuple(layers),
            kv_head_shards=kv_head_shards,
        )
        return metadata.with_pages(num_pages)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one page on one device, all layers together."""
        return self.page_layout().bytes_per_page

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values on one device, all layers together."""
        return self.bytes_per_block // self.page_size

    @property
    def num_sharing_devices(self) -> int:
        """Devices that hold different KV heads; 1 if no layer's heads can be divided."""
        return self.kv_head_shards if any(map(self.is_sharded, range(self.num_hidden_layers))) else 1

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers keep vectors of one size, keys and values alike."""
        if None in self.layers:
            return False
        sizes = {(spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim) for spec in self.layers if spec}
        return len(sizes) == 1 and all(key_dim == value_dim for _, key_dim, value_dim in sizes)

    def is_sharded(self, layer_index: int) -> bool:
        """Return whether a layer's KV heads are divided among devices; if not, each device has all."""
        spec = self.layers[layer_index]
        return spec is not None and self.kv_head_shards > 1 and not spec.num_kv_heads % self.kv_head_shards

    def kv_heads_per_rank(self, layer_index: int) -> int:
        """Return how many of a layer's KV heads one device has; 0 for a layer without KV."""
        spec = self.layers[layer_index]
        if spec is None:
            return 0
        return spec.num_kv_heads // (self.kv_head_shards if self.is_sharded(layer_index) else 1)

    def pages_sharding(self, layer_index: int) -> PagesSharding:
        """Return how a layer's pages are divided: over their KV heads, or not at all."""
        return (
            (self.partition_axis.kv_head_axis, *REPLICATED[1:])
            if self.is_sharded(layer_index)
            else REPLICATED
        )

    def page_layout(self, format_of: Callable[[int], VectorFormat] | None = None) -> PageLayout:
        """Return what lies where in a page of one device.

        Args:
            format_of: the format of a vector, by its number of features; None: as `dtype` says.
        """
        on_device = tuple(
            spec and dataclasses.replace(spec, num_kv_heads=self.kv_heads_per_rank(index))
            for index, spec in enumerate(self.layers)
        )
        if format_of is not None:
            return PageLayout.of(on_device, self.page_size, format_of)
        return _layout(on_device, self.page_size, self.dtype)

    def of_layer(self, layer_index: int) -> Self:
        """Return the metadata of a cache of this layer only."""
        layers = (self.layers[layer_index],)
        return self.replace(num_hidden_layers=1, layers=layers, **_most_of(layers))

    def with_pages(self, num_pages: int) -> Self:
        """Return the metadata of a cache of this many pages."""
        hbm_bytes = num_pages * self.bytes_per_block * self.num_sharing_devices
        return self.replace(num_pages_per_layer=num_pages, hbm_bytes=hbm_bytes)

    def sharded_over(self, mesh: DeviceMesh | None, kv_pages_sharding: PagesSharding | None) -> Self:
        """Return the metadata of this cache on a mesh.

        Args:
            mesh: the devices; None: as many as there are shards.
            kv_pages_sharding: how pages are divided, none of them or over KV heads; None: as it is.

        Raises:
            ValueError: the mesh has another number of devices, or pages cannot be divided so.
        """
        devices = kv_head_axis_size(mesh, self.partition_axis)
        if mesh is not None and devices != self.kv_head_shards:
            raise ValueError(
                f"mesh has {devices} devices along {self.partition_axis.kv_head_axis!r}, and kv_head_shards "
                f"is {self.kv_head_shards}; metadata must be created for the mesh it is used on"
            )
        if kv_pages_sharding is None:
            return self
        if tuple(kv_pages_sharding) == REPLICATED:
            return self.replace(kv_head_shards=1)
        if tuple(kv_pages_sharding) != (self.partition_axis.kv_head_axis, *REPLICATED[1:]):
            raise ValueError(
                f"kv_pages_sharding is {tuple(kv_pages_sharding)}; pages (KV heads, pages, tokens, features) "
                f"can be divided over the first, ({self.partition_axis.kv_head_axis!r}, None, None, None), "
                f"or not at all, {REPLICATED}"
            )
        return self

    def replace(self, **kwargs: Any) -> Self:
        """Return a copy with other values.

        Where all layers keep what `num_kv_heads` and `kv_head_dim_size` say, those of the copy do too; where
        `layers` describes them one by one, it must be given with any of these or `num_hidden_layers`.

        Raises:
            ValueError: a value is out of range; names field and value.
        """
        if self.layers == self._equal_layers():
            kwargs = {"layers": (), **kwargs}
        return dataclasses.replace(self, **kwargs)

    __replace__ = replace  # what `copy.replace` calls

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            **dataclasses.asdict(self),
            "layers": [spec and dataclasses.asdict(spec) for spec in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the metadata that `to_dict` wrote down; only EasyDeL's own fields must be there.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of range; names it.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        check_keys(cls.__name__, data, fields, optional=("layers", "kv_head_shards"))
        axis_names = ("kv_head_axis", "head_axis")
        check_keys("partition_axis", data["partition_axis"], axis_names, optional=axis_names)
        axis = PartitionAxis(**data["partition_axis"])
        layers = data.get("layers", ())
        if not isinstance(layers, Sequence) or isinstance(layers, str):
            raise ValueError(f"layers is {layers!r}; it must be a list")
        for spec in layers:
            if spec is not None:
                check_keys("layers", spec, [field.name for field in dataclasses.fields(KVLayerSpec)])
        specs = tuple(spec and KVLayerSpec(**spec) for spec in layers)
        return cls(**{**data, "partition_axis": axis, "layers": specs})

    def _equal_layers(self) -> tuple[KVLayerSpec, ...]:
        """Return what the layers keep if nothing else than the numbers of heads and features is said."""
        spec = KVLayerSpec(self.num_kv_heads, self.kv_head_dim_size, self.kv_head_dim_size)
        return (spec,) * self.num_hidden_layers

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            check_positive(name, getattr(self, name))
        if not is_whole(self.num_pages_per_layer) or self.num_pages_per_layer < 0:
            raise ValueError(
                f"num_pages_per_layer is {self.num_pages_per_layer!r}; it must be a whole number, and at "
                "least 0"
            )
        if not is_number(self.hbm_bytes) or self.hbm_bytes < 0:
            raise ValueError(f"hbm_bytes is {self.hbm_bytes!r}; it must be a finite number, and at least 0")
        if not is_number(self.hbm_utilization) or not 0.0 < self.hbm_utilization <= 1.0:
            raise ValueError(f"hbm_utilization is {self.hbm_utilization!r}; it must be above 0 and at most 1")

    def _check_layers(self) -> None:
        if len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"layers has {len(self.layers)} entries, and num_hidden_layers is {self.num_hidden_layers}; "
                "there must be one for each layer"
            )
        for index, spec in enumerate(self.layers):
            if spec is not None:
                check_layer(f"layers[{index}]", spec, self.dtype)
        for name, most in _most_of(self.layers).items():
            if getattr(self, name) != most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and the maximum over the layers is {most}; "
                    "when layers differ, give that maximum"
                )


_POSITIVE = (
    "batch_size", "num_hidden_layers", "num_pages_per_sequence", "max_sequences", "page_size", "num_kv_heads",
    "kv_head_dim_size", "kv_head_shards",
)  # fmt: skip


@functools.lru_cache(maxsize=64)
def _layout(layers: tuple[KVLayerSpec | None, ...], page_size: int, dtype: str) -> PageLayout:
    return PageLayout.of(layers, page_size, functools.partial(cache_format, dtype))


def _most_of(layers: Sequence[KVLayerSpec | None]) -> dict[str, int]:
    """Return the fields `num_kv_heads` and `kv_head_dim_size` of these layers; none if no layer has KV."""
    specs = [spec for spec in layers if spec is not None]
    if not specs:
        return {}
    return {
        "num_kv_heads": max(spec.num_kv_heads for spec in specs),
        "kv_head_dim_size": max(max(spec.key_head_dim, spec.value_head_dim) for spec in specs),
    }

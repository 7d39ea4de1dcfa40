"""Which devices of a mesh hold which KV heads."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kv.cache.page_layout import KVLayerSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

PagesSharding = tuple[str | None, ...]
"""For each dimension of a layer's pages (KV heads, pages, tokens, features), the mesh axis that splits it."""

REPLICATED: PagesSharding = (None, None, None, None)


_NO_NAME = object()


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class PartitionAxis:
    """Names the one axis of a mesh that a KV cache is divided over.

    EasyDeL's class also names axes of activations and weights, of which a cache has none: they are refused.

    Args:
        kv_head_axis: the axis over which KV heads are divided; None: every device has all of them.
        head_axis: the same, as EasyDeL calls it.

    Raises:
        ValueError: it is no name, or the two differ.
    """

    kv_head_axis: str | None

    def __init__(self, kv_head_axis: object = _NO_NAME, *, head_axis: object = _NO_NAME) -> None:
        given = {"kv_head_axis": kv_head_axis, "head_axis": head_axis}
        given = {name: axis for name, axis in given.items() if axis is not _NO_NAME}
        for name, axis in given.items():
            if axis is not None and not isinstance(axis, str):
                raise ValueError(f"{name} is {axis!r}; it must be the name of an axis, or None")
        if len(set(given.values())) > 1:
            raise ValueError(
                f"kv_head_axis is {kv_head_axis!r}, and head_axis {head_axis!r}; give one of them"
            )
        object.__setattr__(self, "kv_head_axis", next(iter(given.values()), "tp"))

    @property
    def head_axis(self) -> str | None:
        """The axis over which KV heads are divided, as EasyDeL calls it."""
        return self.kv_head_axis


def count_kv_head_shards(
    mesh: DeviceMesh | None, partition_axis: PartitionAxis, layers: Sequence[KVLayerSpec | None]
) -> int:
    """Return the devices along the axis of KV heads; warn of layers whose heads cannot be divided."""
    shards = kv_head_axis_size(mesh, partition_axis)
    odd = sorted({spec.num_kv_heads for spec in layers if spec is not None and spec.num_kv_heads % shards})
    if odd:
        logger.warning(
            "num_kv_heads %s cannot be divided evenly over the %d devices of the mesh axis %r; every device "
            "holds all of these heads",
            ", ".join(map(str, odd)), shards, partition_axis.kv_head_axis,
        )  # fmt: skip
    return shards


def kv_head_axis_size(mesh: DeviceMesh | None, partition_axis: PartitionAxis) -> int:
    """Return the devices along the mesh axis of KV heads; 1 without a mesh or an axis.

    Raises:
        ValueError: the mesh has no such axis, or its devices are no CPUs.
    """
    axis = partition_axis.kv_head_axis
    if mesh is None or axis is None:
        return 1
    if mesh.device_type != "cpu":
        raise ValueError(f"mesh has {mesh.device_type!r} devices; Quire keeps KV in CPU memory")
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ValueError(f"partition_axis.kv_head_axis is {axis!r}; the mesh has the axes {list(names)}")
    return int(mesh.size(names.index(axis)))

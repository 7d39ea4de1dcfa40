"""Steps that are captured once for each size, and then replayed on new numbers.

A GPU computes most operations of a decode step, or of a few hundred tokens, in less time than the host takes
to ask for them. Captured as one graph (a CUDA graph), they are asked for at once. What is replayed reads the
same addresses and has the same sizes: so what changes from step to step is copied to places of its own before
(`StaticArrays`), sizes are rounded up to some that steps have again and again, and each combination of sizes
is captured when it comes up for the second time. The first time compiles its kernels.

Steps with chunks of prompts differ in more sizes than decode steps do, and so these are rounded up further.
They are captured only if the GPU, padding included, takes less time than the host does to launch them.

Ranks that compute a model together do this each for its part. What is captured and replayed, and which
captures are kept, follows from the batches alone, and so it is the same on all of them; only whether a
capture succeeds has to be agreed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from quire.execution.capture_backoff import CaptureBackoff
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.attention.kv_layer import KVLayer
from quire.kernels.attention.step_arrays import (
    DerivedArrays,
    DeviceArrays,
    HostArrays,
    MakeArrays,
    StepArrays,
    lengthened,
)
from quire.kernels.devices.device import HOST, copy_to_device
from quire.kernels.interface import Capture, NotCapturableError
from quire.kernels.size_classes import CHUNK_SIZES, EXACT_SIZES
from quire.step import GraphStats, Int64Array

if TYPE_CHECKING:
    from quire.execution.model import StepModel
    from quire.kernels.interface import KernelSet

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128
"""Captures that are kept; the least recently used goes first."""

_TOKEN_IDS = "token ids"
_LOGIT_ROWS = "rows of logits"
_NUM_LARGEST = "number of largest logits"
_ALIGNMENT = 16  # bytes, of arrays that are copied together
_NO_ROWS: Int64Array = np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(slots=True, frozen=True)
class StepLogits:
    """The logits of a step's R sampling positions, on the device."""

    rows: torch.Tensor  # [R, vocab] float32
    captured: torch.Tensor | None = None
    """[R or more, vocab] if the step was replayed, `rows` and then padding: the address to which its capture
    writes each time. None: it was computed."""


class StepGraphs:
    """Computes steps and the logits of some of their tokens, or of all.

    Args:
        step_of: returns what computes a step with such logits, which is captured.
        kv: where keys and values of each layer live.
        capture: of the device.
        token_ids: makes token ids of what is copied for them, [T] int64 both, on the device.
        kernels: of the model.
    """

    def __init__(
        self,
        step_of: Callable[[AttentionBatch, Int64Array | None], AbstractContextManager[StepModel]],
        kv: Sequence[KVLayer],
        capture: Capture,
        token_ids: Callable[[torch.Tensor], torch.Tensor],
        kernels: KernelSet,
    ) -> None:
        self._step_of = step_of
        self._kv = kv
        self._capture: Capture | None = capture
        self._token_ids = token_ids
        self._makers: dict[Hashable, MakeArrays] = {}
        self._graphs: OrderedDict[Hashable, _StepGraph] = OrderedDict()
        self._kernels = kernels
        self._backoff = CaptureBackoff()
        self.stats = GraphStats()
        """Of these steps; the runner adds those that it computes without them."""

    @property
    def max_array_bytes(self) -> int:
        """Bytes of the arrays of as many captures as are kept, all as large as the largest so far."""
        return MAX_GRAPHS * max((graph.arrays.num_bytes for graph in self._graphs.values()), default=0)

    def logits(
        self,
        token_ids: Int64Array,
        batch: AttentionBatch,
        rows: Int64Array | None = None,
        num_largest: int | None = None,
    ) -> StepLogits:
        """Compute a step of T tokens.

        Args:
            token_ids: [T] what token ids are made of.
            batch: which tokens these are; without key scores, skipped or selected keys.
            rows: [R] the tokens whose logits are computed, at least one; None: all of them.
            num_largest: see `Decoder.logits`; None: it computes all.

        Returns:
            Logits, which the next step overwrites.
        """
        graph = self._computed(token_ids, batch, rows, num_largest)
        assert graph.logits is not None
        num_rows = len(token_ids) if rows is None else len(rows)
        return StepLogits(graph.logits[:num_rows], None if graph.replay is None else graph.logits)

    def forward(self, token_ids: Int64Array, batch: AttentionBatch) -> torch.Tensor:
        """Compute a step without logits, see `logits`; return its hidden states [T or more, hidden]."""
        graph = self._computed(token_ids, batch, _NO_ROWS)
        assert graph.hidden is not None
        return graph.hidden

    def _computed(
        self,
        token_ids: Int64Array,
        batch: AttentionBatch,
        rows: Int64Array | None,
        num_largest: int | None = None,
    ) -> _StepGraph:
        may_capture = self._backoff.allows_attempt() and self._capture is not None
        with self._step_of(batch, rows) as model:
            graph, padded = self._filled(token_ids, batch, rows, num_largest)
            if graph.replay is None and graph.was_computed and may_capture:
                graph.replay = self._captured(model, graph, padded)
            if graph.replay is not None:
                graph.replay()
                self.stats.num_replayed += 1
            else:
                self._compute(model, graph, padded)
                self._learn(graph)
                self.stats.num_launched += 1
        return graph

    def _filled(
        self,
        token_ids: Int64Array,
        batch: AttentionBatch,
        rows: Int64Array | None,
        num_largest: int | None,
    ) -> tuple[_StepGraph, AttentionBatch]:
        """Return the graph of the sizes that a step is padded to, its arrays filled, and the padded step."""
        sizes = self._kernels.step_sizes
        if rows is not None and sizes is not EXACT_SIZES:
            sizes = CHUNK_SIZES
        padded = batch.padded(sizes)
        made = {name: make(padded) for name, make in self._makers.items()}
        made[_TOKEN_IDS] = HostArrays((lengthened(token_ids, padded.num_rows),))
        if rows is not None:
            made[_LOGIT_ROWS] = HostArrays((lengthened(rows, sizes.rows(len(rows))),))
        if num_largest is not None:
            made[_NUM_LARGEST] = HostArrays((np.array([num_largest]),))
        graph = self._graph_of(made)
        graph.arrays.fill(made)
        padded.step_arrays = graph.arrays
        for number, other in enumerate(padded.others):
            derive = functools.partial(_other_group, number=number)
            other.step_arrays = DerivedArrays(graph.arrays, padded, number, derive)
        return graph, padded

    def _graph_of(self, made: Mapping[Hashable, HostArrays]) -> _StepGraph:
        sizes = tuple(
            (name, tuple(array.shape for array in arrays), numbers)
            for name, (arrays, numbers) in made.items()
        )
        graph = self._graphs.get(sizes)
        if graph is None:
            graph = self._graphs[sizes] = _StepGraph(StaticArrays(made, self._kernels.device))
            if len(self._graphs) > MAX_GRAPHS:
                _, oldest = self._graphs.popitem(last=False)
                self.stats.num_graphs -= oldest.replay is not None
        self._graphs.move_to_end(sizes)
        return graph

    def _captured(
        self, model: StepModel, graph: _StepGraph, batch: AttentionBatch
    ) -> Callable[[], None] | None:
        """Return what replays a step; None, and a back-off begins, if the capture fails on any rank."""
        replay = None
        assert self._capture is not None
        try:
            replay = self._capture(lambda: self._compute(model, graph, batch))
        except NotCapturableError as error:
            logger.info("steps are not captured: %s", error)
            self._capture = None
        except Exception:
            logger.exception("a step cannot be captured as a graph; steps are slower without")
        if model.agree(is_captured=replay is not None):
            self.stats.num_graphs += 1
            return replay
        if replay is not None:
            logger.warning("another rank cannot capture a step as a graph; steps are slower without")
        self._backoff.begin()
        self.stats.num_failures += 1
        return None

    def _compute(self, model: StepModel, graph: _StepGraph, batch: AttentionBatch) -> None:
        token_ids = self._token_ids(graph.arrays.token_ids)
        hidden = graph.hidden = model.forward(token_ids, self._kv, batch)
        rows = graph.arrays.logit_rows
        if rows is None or len(rows):
            graph.logits = model.logits(hidden if rows is None else hidden[rows], graph.arrays.num_largest)

    def _learn(self, graph: _StepGraph) -> None:
        """Learn which arrays steps read; if this one has read new ones, another graph takes its place.

        A step that was only compiled is not captured next: CUDA forbids that a kernel is loaded meanwhile.
        """
        graph.was_computed = not (self._kernels.compiles_only or graph.arrays.makers_of_others)
        self._makers.update(graph.arrays.makers_of_others)


class _StepGraph:
    """Steps of equal sizes. What they compute, and `arrays`, must stay where a capture has found it."""

    def __init__(self, arrays: StaticArrays) -> None:
        self.arrays = arrays
        self.hidden: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.was_computed = False  # so that there is nothing left to compile
        self.replay: Callable[[], None] | None = None


class StaticArrays(StepArrays):
    """Arrays at addresses that stay the same, all filled by one copy.

    Args:
        made: arrays of the sizes that they will have.
        device: where they are.
    """

    def __init__(self, made: Mapping[Hashable, HostArrays], device: torch.device) -> None:
        super().__init__()
        places: dict[Hashable, list[slice]] = {}
        end = 0
        for name, (arrays, _) in made.items():
            places[name] = []
            for array in arrays:
                places[name].append(slice(end, end + array.nbytes))
                end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._octets = torch.zeros(end, dtype=torch.uint8, device=device)
        self._octets_to_copy = self._octets if device == HOST else torch.zeros(end, dtype=torch.uint8)
        octets = self._octets_to_copy.numpy()
        self._to_copy: dict[Hashable, list[npt.NDArray[Any]]] = {}
        for name, (arrays, numbers) in made.items():
            placed = list(zip(places[name], arrays, strict=True))
            self._on_device[name] = DeviceArrays(
                tuple(
                    self._octets[place].view(_torch_type(array)).view(array.shape) for place, array in placed
                ),
                numbers,
            )
            self._to_copy[name] = [
                octets[place].view(array.dtype).reshape(array.shape) for place, array in placed
            ]
        self.makers_of_others: dict[Hashable, MakeArrays] = {}
        """What the step has asked for beside the arrays that there are; these are made once, for it only."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self._octets.nbytes

    @property
    def token_ids(self) -> torch.Tensor:
        """What token ids are made of, [T] int64."""
        return self._on_device[_TOKEN_IDS].arrays[0]

    @property
    def logit_rows(self) -> torch.Tensor | None:
        """The tokens whose logits are computed, [R] int64; None: all of them."""
        return self._array(_LOGIT_ROWS)

    @property
    def num_largest(self) -> torch.Tensor | None:
        """How many of the largest logits are wanted, [1] int64; None: all of them."""
        return self._array(_NUM_LARGEST)

    def _array(self, name: Hashable) -> torch.Tensor | None:
        found = self._on_device.get(name)
        return None if found is None else found.arrays[0]

    def fill(self, made: Mapping[Hashable, HostArrays]) -> None:
        """Copy another step's arrays of the same sizes to the device, without waiting."""
        for name in self.makers_of_others:  # of a step that has failed, else others are known by now
            self._on_device.pop(name, None)
        self.makers_of_others = {}
        for name, (arrays, _) in made.items():
            for to_copy, array in zip(self._to_copy[name], arrays, strict=True):
                to_copy[...] = array
        if self._octets_to_copy is not self._octets:
            copy_to_device(self._octets_to_copy, self._octets)

    @override
    def of(
        self, batch: AttentionBatch, name: Hashable, make: MakeArrays, device: torch.device
    ) -> DeviceArrays:
        if name not in self._to_copy:
            self.makers_of_others[name] = make
        return super().of(batch, name, make, device)


def _other_group(batch: AttentionBatch, number: int) -> AttentionBatch:
    return batch.others[number]


def _torch_type(array: np.ndarray[Any, Any]) -> torch.dtype:
    return torch.from_numpy(array).dtype

"""Starting the ranks of a tensor-parallel engine, and loading rank 0's shard beside the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.ranks.messages import RankStart
from quire.engine.ranks.watch import LAP, Exchanges
from quire.kernels.devices.cores import usable_cores
from quire.models.layers.attention import attention_of
from quire.models.shard import Shard

if TYPE_CHECKING:
    import torch

    from quire.engine.ranks.group import RankGroup
    from quire.engine.ranks.leading import LeadingDecoder
    from quire.engine.ranks.process_group import GroupCommunicator
    from quire.models.checkpoints.loading import WeightOptions
    from quire.models.config import ModelConfig

logger = logging.getLogger(__name__)


def threads_of_rank(num_threads: int, size: int) -> int:
    """Return how many threads each of `size` ranks computes on, of `num_threads` in all (0: all cores)."""
    return num_threads if size == 1 else max(1, (num_threads or usable_cores()) // size)


def load_with_ranks(
    ranks: RankGroup,
    model_path: Path,
    model_config: ModelConfig,
    *,
    options: WeightOptions,
    num_threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> LeadingDecoder:
    """Let all ranks load their shards of a model; return this rank's, which leads.

    Args:
        ranks: the others.
        model_path: directory of the model.
        model_config: of the whole model.
        options: how to hold the weights.
        num_threads: of each rank.
        on_progress: called with (bytes read, total bytes) of this rank's shard while it loads.

    Raises:
        EngineDeadError: another rank has failed.
        QuireError: this rank's shard cannot be loaded.
    """
    from quire.engine.ranks.leading import LeadingDecoder
    from quire.kernels.dispatch import kernel_set
    from quire.models.checkpoints.loading import load_decoder
    from quire.models.parallel import TensorParallel

    _warn_of_shared_kv_heads(model_config, ranks.size)

    def start_of(rank: int) -> RankStart:
        return RankStart(
            rank=rank,
            size=ranks.size,
            rendezvous=ranks.rendezvous,
            timeout=ranks.timeout,
            model_path=str(model_path),
            model=model_config,
            weights=options,
            num_threads=num_threads,
        )

    def check_and_report(done: int, total: int) -> None:
        ranks.raise_failure()
        if on_progress is not None:
            on_progress(done, total)

    ranks.start(start_of)
    shard = Shard(0, ranks.size)
    communicator = _communicator(kernel_set(options.kernels).device, shard, ranks)
    decoder = load_decoder(
        model_path,
        model_config,
        options=options,
        parallel=TensorParallel(shard, communicator),
        on_progress=check_and_report,
    )
    ranks.wait_until_ready()
    return LeadingDecoder(decoder, communicator, ranks)


def _communicator(device: torch.device, shard: Shard, ranks: RankGroup) -> GroupCommunicator:
    """Connect rank 0 with the others, in a thread: the call may hang if one of them ends meanwhile."""
    from quire.engine.ranks.connecting import communicator_on

    connected: Future[GroupCommunicator] = Future()

    def connect() -> None:
        try:
            connected.set_result(communicator_on(device, shard, ranks.rendezvous, timeout=ranks.timeout))
        except Exception as error:
            connected.set_exception(error)

    threading.Thread(target=connect, name="quire-connect", daemon=True).start()
    deadline = time.monotonic() + ranks.timeout + LAP
    while not _is_done(connected) and time.monotonic() < deadline:
        ranks.raise_failure()
    try:
        communicator = connected.result(0)
    except Exception as error:
        raise ranks.failure(error) from error
    if isinstance(communicator, Exchanges):
        ranks.watch_exchanges(communicator)
    return communicator


def _is_done(future: Future[GroupCommunicator]) -> bool:
    """Return whether there is a result; wait for it a little while."""
    return bool(wait([future], LAP).done)


def _warn_of_shared_kv_heads(config: ModelConfig, size: int) -> None:
    for num_heads, count in sorted({(part.num_heads, part.num_kv_heads) for part in attention_of(config)}):
        if count % size:
            logger.warning(
                "the %d KV heads of this model cannot be divided among %d ranks "
                "(EngineConfig.tensor_parallel_size); each rank holds those that its query heads need, %d",
                count,
                size,
                len(Shard(0, size).kv_heads(num_heads, count)),
            )

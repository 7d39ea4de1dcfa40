"""An engine for the callers of one thread: `receive_outputs` makes it run and takes in what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.messages import EngineInfo, GetStats, Reply, ResetPrefixCache, ToEngine
from quire.front.inprocess_client import InProcessClient
from quire.front.live_requests import EngineClient, LiveRequests
from quire.front.process_client import EngineProcess
from quire.models.checkpoints.hub import resolve_model
from quire.scheduling.outputs import SchedulerStats

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

ProgressCallback = Callable[[int, int], None]


class Session:
    """An engine, here or in a process of its own, and the requests of one thread.

    Args:
        config: of the engine.
        engine_process: run the engine in a process of its own, which is not waited for.
        on_progress: called while weights load with (bytes done, bytes in all).

    Raises:
        QuireError: the engine cannot be built.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_process: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        model_path = resolve_model(config.model)
        client: EngineClient = (
            EngineProcess(config, model_path)
            if engine_process
            else InProcessClient(config, model_path, on_progress=on_progress)
        )

        # slow: meanwhile, an engine process imports torch
        from quire.models.checkpoints.tokenizer_reading import read_tokenizer

        self.requests = LiveRequests(client, read_tokenizer(model_path))
        if on_progress is not None:
            self.requests.on_progress = on_progress

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.requests.tokenizer

    def wait_until_ready(self) -> EngineInfo:
        """Return once the engine takes requests.

        Raises:
            QuireError: why it could not be built.
            EngineDeadError: its process has ended.
        """
        while not self.requests.is_ready and self.requests.failure is None:
            self.receive_outputs()
        return self.requests.info

    def receive_outputs(self) -> None:
        """Wait for the engine's next outputs; in-process, run one step.

        If the engine ends, every live request is answered with that.
        """
        self.requests.receive(None)
        if self.requests.failure is not None:
            self.requests.client.close()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state as it is now."""
        stats = self._call(GetStats).stats
        assert stats is not None
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing happens, while any block is in use."""
        return self._call(ResetPrefixCache).done

    def close(self) -> None:
        """End the engine."""
        self.requests.close()

    def _call(self, make: Callable[[int], ToEngine]) -> Reply:
        self.wait_until_ready()
        replies: list[Reply] = []
        self.requests.call(make, replies.append)
        while not replies:
            self.requests.raise_failure()
            self.receive_outputs()
        return replies[0]

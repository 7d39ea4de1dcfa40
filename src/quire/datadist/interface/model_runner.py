"""Model runners, passed by the user or made by a registered factory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.datadist.interface.kv_cache import KvCache
from quire.datadist.status import LLMStatusCode, failure


class ModelRunner(ABC):
    """Computes a model on a cache. Its methods may use the `KvCacheManager`."""

    @abstractmethod
    def run_model(self, kv_cache: KvCache, input_tensors: Any, **kwargs: Any) -> Any:
        """Compute one call of `LLMModel.predict`.

        Args:
            kv_cache: to write the KV to and read it from: on a PROMPT a new cache for each call, on a DECODER
                and with paging always the same.
            input_tensors: the `inputs` of `predict`, unchanged.
            kwargs: its keywords, unchanged.

        Returns:
            The result of `predict`.
        """

    def on_cache_allocated(self, kv_cache: KvCache) -> None:  # noqa: B027 - may be left out
        """Called on a DECODER when the model's cache has been allocated; it stays the same for all calls."""

    def on_cache_deallocated(self, kv_cache: KvCache) -> None:  # noqa: B027 - may be left out
        """Called on a DECODER in `finalize`, when the model's cache has been released."""


RunnerFactory = Callable[[dict[str, str]], ModelRunner]
"""Makes a runner from a model's options."""

_default_factory: RunnerFactory | None = None


def set_default_runner_factory(factory: RunnerFactory) -> None:
    """Set the factory of runners for models added without one."""
    global _default_factory  # noqa: PLW0603 - one for the process, as the interface has it
    if not callable(factory):
        raise TypeError(f"factory must be callable, not {type(factory).__name__}")
    _default_factory = factory


def default_runner(model_options: dict[str, str]) -> ModelRunner:
    """Return a runner of the registered factory.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: no factory is registered.
        TypeError: the factory returned something else.
    """
    if _default_factory is None:
        raise failure(
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            "there is no default runner; pass model_runner, or call set_default_runner_factory",
        )
    runner = _default_factory(model_options)
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"the default runner factory returned {type(runner).__name__}, not a ModelRunner")
    return runner

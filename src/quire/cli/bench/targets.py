"""Targets of a benchmark: an engine that it starts, or a running server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from quire.cli.bench.offline import fixed_length_sampling
from quire.cli.bench.target import RequestUsage, Target
from quire.cli.bench.workload import BenchRequest, regular_token_ids
from quire.cli.bench_options import TargetConfig
from quire.cli.console import flag_name, parameter_name
from quire.cli.options import is_nested
from quire.cli.progress import LoadingBar
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.limits import limits_of

if TYPE_CHECKING:
    from quire.front.async_llm import AsyncLLM


def open_target(config: TargetConfig, engine: EngineConfig) -> contextlib.AbstractAsyncContextManager[Target]:
    """Return the target that `config` names; it is ready once the context is entered.

    Raises:
        ConfigError: the target is a server, but engine flags are given or aiohttp is missing.
    """
    if not config.base_url:
        return engine_target(engine)
    _refuse_engine_flags(engine)
    try:
        from quire.cli.bench.http_target import server_target
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError('--base-url needs aiohttp: pip install "quire[bench]"') from None
    return server_target(config, engine.model)


def _refuse_engine_flags(engine: EngineConfig) -> None:
    _refuse_changes(engine, EngineConfig(model=engine.model))


def _refuse_changes(given: Any, default: Any) -> None:
    """Refuse the first field, nested ones included, that is not as in `default`."""
    cls: type = type(default)
    for name, limits in limits_of(cls).items():
        value, unset = getattr(given, name), getattr(default, name)
        if is_nested(limits):
            _refuse_changes(value or limits.kind(), unset or limits.kind())
        elif value != unset:
            flag = flag_name(parameter_name(cls.__name__, name))
            raise ConfigError(
                f"{flag} is {value}, but with --base-url no engine is started; "
                "leave it out, or start the server with it"
            )


@contextlib.asynccontextmanager
async def engine_target(engine: EngineConfig) -> AsyncIterator[Target]:
    """Start an engine in its own process; shut it down afterwards."""
    from quire.front.async_llm import AsyncLLM

    llm = AsyncLLM(engine)
    try:
        with LoadingBar(engine.model) as on_progress:
            await llm.wait_until_ready(on_progress)
        yield EngineTarget(llm)
    finally:
        await llm.shutdown()


class EngineTarget:
    """An engine in its own process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.vocabulary = regular_token_ids(llm.tokenizer, llm.info.vocab_size)
        self.max_model_len: int | None = llm.info.max_model_len

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> RequestUsage:
        """Run one request to its end."""
        usage = RequestUsage(0, 0)
        outputs = self._llm.generate(request.prompt_token_ids, fixed_length_sampling(request.output_len))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                completion = output.outputs[0]
                if len(completion.token_ids) > usage.num_output_tokens:
                    on_output()
                usage = RequestUsage(len(completion.token_ids), output.num_cached_tokens)
                if completion.error is not None:
                    raise QuireError(completion.error)
        return usage

"""What a benchmark sends requests to: an engine of its own, or a server that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.cli.bench.config import TargetConfig
from quire.cli.bench.offline import exactly
from quire.cli.bench.workload import BenchRequest, ordinary_tokens
from quire.cli.console import flag_name
from quire.cli.options import config_fields
from quire.cli.progress import LoadingBar
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError

if TYPE_CHECKING:
    import numpy as np

    from quire.front.async_llm import AsyncLLM


class Usage(NamedTuple):
    """Tokens that a finished request generated, and prompt tokens that it found in the prefix cache."""

    num_output_tokens: int
    num_cached_tokens: int


class Target(Protocol):
    """Something that answers requests and streams."""

    vocabulary: np.ndarray
    """Ids [n] to make prompts of."""

    max_model_len: int | None
    """Maximum number of tokens of a prompt and its output together; None if unknown."""

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> Usage:
        """Answer a request.

        Args:
            on_output: called for each output that brings tokens, when it comes.

        Raises:
            QuireError: the request failed.
            EngineDeadError: so will all others.
        """


def open_target(config: TargetConfig, engine: EngineConfig) -> contextlib.AbstractAsyncContextManager[Target]:
    """Return what `config` names, ready once it is entered.

    Raises:
        ConfigError: it is a server, and flags of an engine are given or httpx is missing.
    """
    if not config.base_url:
        return engine_target(engine)
    _refuse_engine_flags(engine)
    try:
        from quire.cli.bench.http_target import server_target
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ConfigError('--base-url needs httpx: pip install "quire[bench]"') from None
    return server_target(config, engine.model)


def _refuse_engine_flags(engine: EngineConfig) -> None:
    default = EngineConfig(model=engine.model)
    parts: dict[type, tuple[Any, Any]] = {EngineConfig: (engine, default)}
    for name in ("scheduler", "speculation"):
        given = getattr(engine, name)
        parts[type(given)] = (given, getattr(default, name))
    for owner, field, _ in config_fields(EngineConfig):
        given, unset = (getattr(part, field.name) for part in parts[owner])
        if given != unset:
            raise ConfigError(
                f"{flag_name(field.name)} is {given}, but with --base-url no engine is started; "
                "leave it out, or give it to the server"
            )


@contextlib.asynccontextmanager
async def engine_target(engine: EngineConfig) -> AsyncIterator[Target]:
    """Start an engine in a process of its own; end it afterwards."""
    from quire.front.async_llm import AsyncLLM

    llm = AsyncLLM(engine)
    try:
        with LoadingBar(engine.model) as on_progress:
            await llm.wait_until_ready(on_progress)
        yield EngineTarget(llm)
    finally:
        await llm.shutdown()


class EngineTarget:
    """An engine in a process of its own."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.vocabulary = ordinary_tokens(llm.tokenizer, llm.info.vocab_size)
        self.max_model_len: int | None = llm.info.max_model_len

    async def send(self, request: BenchRequest, on_output: Callable[[], None]) -> Usage:
        """Answer a request."""
        usage = Usage(0, 0)
        outputs = self._llm.generate(request.prompt_token_ids, exactly(request.output_len))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                completion = output.outputs[0]
                if len(completion.token_ids) > usage.num_output_tokens:
                    on_output()
                usage = Usage(len(completion.token_ids), output.num_cached_tokens)
                if completion.error is not None:
                    raise QuireError(completion.error)
        return usage

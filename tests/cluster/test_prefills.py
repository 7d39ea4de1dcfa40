"""A prompt that another engine computes: how its end and the wait for it meet."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from quire.cluster.engines.registry import Engine, Role
from quire.cluster.prefills import Prefill


async def failed() -> bool:
    return False


def run(coroutine) -> list[dict]:
    """Run a coroutine, and return what its loop reported."""
    reports: list[dict] = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        await coroutine
        await asyncio.sleep(0)

    asyncio.run(watched())
    return reports


async def wait_for_ever(prefill: Prefill) -> None:
    async with asyncio.timeout(60) as waiting:
        with prefill.ending(waiting):
            await asyncio.Event().wait()


def test_a_wait_ends_when_its_prompt_is_not_computed():
    async def wait() -> None:
        prefill = Prefill(Engine("http://p", Role.PREFILL), msgspec.Raw(b""), asyncio.ensure_future(failed()))
        with pytest.raises(TimeoutError):
            await wait_for_ever(prefill)

    assert not run(wait())


def test_a_prompt_may_fail_in_the_moment_in_which_the_wait_for_it_ends():
    async def wait() -> None:
        computing = asyncio.get_running_loop().create_future()
        prefill = Prefill(Engine("http://p", Role.PREFILL), msgspec.Raw(b""), computing)
        async with asyncio.timeout(60) as waiting:
            with prefill.ending(waiting):
                computing.set_result(False)  # the loop calls back in its next turn

    assert not run(wait())

"""Fixtures: sides by themselves, and pairs of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import sides
from model_pairs import Models
from pairs import PAIRS, Pair, PairMaker, PromptProcess

from quire.datadist import LLMDataDist, LLMRole


@pytest.fixture(scope="module")
def module_process() -> Iterator[PromptProcess]:
    process = PromptProcess()
    yield process
    process.end()


@pytest.fixture
def prompt_process(module_process: PromptProcess, request: pytest.FixtureRequest) -> Iterator[PromptProcess]:
    num_failed = request.session.testsfailed
    yield module_process
    if request.session.testsfailed > num_failed:
        module_process.end()


@pytest.fixture(params=PAIRS)
def make_pair(request: pytest.FixtureRequest, prompt_process: PromptProcess) -> Iterator[PairMaker]:
    with contextlib.ExitStack() as stack:
        yield PairMaker(request.param, prompt_process, stack)


@pytest.fixture
def pair(make_pair: PairMaker) -> Pair:
    return make_pair()


@pytest.fixture
def new_datadist() -> Iterator[Callable[[LLMRole, int], LLMDataDist]]:
    """Make objects that are not initialised, and finalize them when the test ends."""
    with contextlib.ExitStack() as stack:

        def new(role: LLMRole, cluster_id: int = 1) -> LLMDataDist:
            made = LLMDataDist(role, cluster_id)
            stack.callback(made.finalize)
            return made

        yield new


@pytest.fixture
def prompt() -> Iterator[LLMDataDist]:
    started = sides.start_prompt()
    yield started
    started.finalize()


@pytest.fixture
def decoder() -> Iterator[LLMDataDist]:
    started = sides.start_decoder()
    yield started
    started.finalize()


@pytest.fixture
def models(pair: Pair) -> Models:
    return Models(pair)

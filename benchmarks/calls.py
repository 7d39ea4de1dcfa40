"""Python calls into quire on the way of a chat and in a decode step: a count, which no busy machine changes.

    python benchmarks/calls.py [--model mini] [--files | --functions]

Three stretches are counted with `sys.setprofile`; a generator counts each time it goes on:

- chat: from `LLM.chat` to the first `schedule()`, with the engine in the caller's process;
- step: from one `schedule()` of a decode step of one request to the next, outputs and detokenizing included:
  the step with the fewest calls, since some send statistics or take a block;
- http: from the socket of a streamed chat to its plan, with the engine in a process of its own: what the
  server does until the engine's message is sent, and what the engine does from its message to the plan.

Each is counted when all of it has run before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import quire
from quire import LLM, EngineConfig, SamplingParams
from quire.front.async_llm import AsyncLLM
from quire.front.process import launch
from quire.front.process.client import EngineProcess

ROOT = str(Path(quire.__file__).parent) + os.sep
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
STEADY_STEPS = slice(8, 24)  # of a request: buffers have their sizes
ENGINE_OPTION = "--count-engine"
FIRST_PLAN_LIMIT = 60.0  # seconds
SETTLE_TIME = 0.3  # seconds in which what is left of the chat before ends

Calls = Counter[tuple[str, str]]
"""How often each function was called, by file in quire and qualified name."""


class CallCounter:
    """Counts calls of quire's functions in this thread and, on demand, in all that it will start."""

    def __init__(self, *, in_threads: bool) -> None:
        self.calls: Calls = Counter()
        self._is_open = False
        if in_threads:
            threading.setprofile(self._note)
        sys.setprofile(self._note)

    def open(self) -> None:
        """Begin to count, from nothing."""
        self.calls = Counter()
        self._is_open = True

    def close(self) -> Calls:
        """Stop to count; return what was counted."""
        self._is_open = False
        return self.calls

    def end(self) -> None:
        """Leave this thread and those that are started from now on alone."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_open and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            code = frame.f_code
            self.calls[code.co_filename.removeprefix(ROOT), code.co_qualname] += 1


@contextlib.contextmanager
def counting(*, in_threads: bool) -> Iterator[CallCounter]:
    """Yield a counter, which ends with the block."""
    counter = CallCounter(in_threads=in_threads)
    try:
        yield counter
    finally:
        counter.end()


def hooked(function: Callable[..., Any], before: Callable[[], object]) -> Callable[..., Any]:
    """Return `function`, before each call of which `before` is called."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return called


def chat_and_step(model: str, **options: Any) -> tuple[Calls, Calls]:
    """Return the calls of a chat up to its first plan, and those of a decode step."""
    params = SamplingParams(max_tokens=STEADY_STEPS.stop + 2, ignore_eos=True, temperature=0.0)
    plans: list[Calls] = []
    with LLM(model, **options) as llm, counting(in_threads=False) as counter:

        def planned() -> None:
            plans.append(counter.close())
            counter.open()

        scheduler = llm._session.requests.client.core.scheduler  # type: ignore[attr-defined]
        llm.chat(MESSAGES, params)
        with mock.patch.object(scheduler, "schedule", hooked(scheduler.schedule, planned)):
            counter.open()
            llm.chat(MESSAGES, params)
        counter.close()
    return plans[0], min(plans[STEADY_STEPS], key=Calls.total)


# -- over HTTP ---------------------------------------------------------------------------------------------


def http_chat(model: str) -> Calls:
    """Return the calls of a streamed chat from the socket to its plan, in the server and in the engine."""
    with contextlib.ExitStack() as stack:
        planned = Path(stack.enter_context(tempfile.TemporaryDirectory()), "planned.json")
        start = functools.partial(_start_engine, planned)
        stack.enter_context(mock.patch.object(launch, "_start", start))
        counter = stack.enter_context(counting(in_threads=True))
        sent: list[Calls] = []
        send = EngineProcess.send

        def sends(process: EngineProcess, message: Any) -> None:
            send(process, message)
            sent.append(counter.close())

        stack.enter_context(mock.patch.object(EngineProcess, "send", sends))
        llm = AsyncLLM(EngineConfig(model=model))
        port = stack.enter_context(_served(llm))
        for _ in range(2):
            time.sleep(SETTLE_TIME)
            planned.unlink(missing_ok=True)
            sent.clear()
            counter.open()
            _stream(port, model)
        calls = sent[0]
        calls.update({(file, name): count for file, name, count in json.loads(_read(planned))})
    return calls


def _start_engine(planned: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Start an engine process as `launch` does, which counts."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid()), ENGINE_OPTION, str(planned), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )


def count_engine(planned: Path) -> None:
    """Be an engine process, and write the calls from a request's message to its plan to a file."""
    from quire.engine.process import main as process
    from quire.scheduling import Scheduler

    counter = CallCounter(in_threads=False)
    schedule = Scheduler.schedule

    def plan(scheduler: Scheduler) -> Any:
        output = schedule(scheduler)
        calls = counter.close()
        if output.scheduled_new_reqs:
            text = json.dumps([[file, name, count] for (file, name), count in calls.items()])
            planned.with_suffix(".part").write_text(text)
            planned.with_suffix(".part").rename(planned)
        return output

    deliver = process.Connection.deliver
    with (
        mock.patch.object(Scheduler, "schedule", plan),
        mock.patch.object(process.Connection, "deliver", hooked(deliver, counter.open)),
    ):
        process.main()


@contextlib.contextmanager
def _served(llm: AsyncLLM) -> Iterator[int]:
    """Serve an engine in a thread; yield the port."""
    from quire.config import ConnectionConfig, EdgeConfig, ServerConfig
    from quire.server.app import create_app
    from quire.server.http.listening import listener
    from quire.server.http.server import HttpServer

    end: Future[None] = Future()
    ready: Future[None] = Future()
    with listener("127.0.0.1", 0, EdgeConfig()) as listens:

        async def serve() -> None:
            await llm.wait_until_ready()
            app = create_app(llm, ServerConfig())
            async with HttpServer(app, ConnectionConfig(), listens.tls, None).serving(listens.socket):
                ready.set_result(None)
                await asyncio.wrap_future(end)
            await llm.shutdown()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            ready.result(FIRST_PLAN_LIMIT)
            yield listens.socket.getsockname()[1]
        finally:
            end.set_result(None)
            thread.join()


def _stream(port: int, model: str) -> None:
    """Ask for a chat, and read its stream to the end."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4, "stream": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {text!r}")


def _read(path: Path) -> str:
    """Return a file's text once it is there."""
    ends = time.monotonic() + FIRST_PLAN_LIMIT
    while not path.exists():
        if time.monotonic() > ends:
            raise RuntimeError("the engine has planned nothing")
        time.sleep(0.01)
    return path.read_text()


# -- report ------------------------------------------------------------------------------------------------


def report(name: str, calls: Calls, *, with_files: bool, with_functions: bool) -> str:
    """Return the calls of a stretch, in all, by the first folder, and by file or by function on demand."""
    files, folders = Counter[str](), Counter[str]()
    for (file, _), count in calls.items():
        files[file] += count
        folders[file.split(os.sep)[0].removesuffix(".py")] += count
    lines = [f"{name}: {calls.total()} calls of {len(calls)} functions in {len(files)} files"]
    lines += [f"  {count:5}  {folder}" for folder, count in folders.most_common()]
    if with_files:
        lines += [f"  {count:5}    {file}" for file, count in files.most_common()]
    if with_functions:
        lines += [f"  {count:5}    {file} {function}" for (file, function), count in calls.most_common()]
    return "\n".join(lines)


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--files", action="store_true", help="say how many calls each file has")
    parser.add_argument("--functions", action="store_true", help="say how often each function is called")
    parser.add_argument("--no-http", action="store_true", help="leave out the server")
    args = parser.parse_args()
    from quire.kernels.dispatch import kernel_set

    print(f"kernels: {kernel_set().name}, {kernel_set().weight_layout or 'in torch'}")
    chat, step = chat_and_step(args.model)
    stretches = {"chat": chat, "step": step}
    if not args.no_http:
        stretches["http"] = http_chat(args.model)
    for name, calls in stretches.items():
        print(report(name, calls, with_files=args.files, with_functions=args.functions))


if __name__ == "__main__":
    if ENGINE_OPTION in sys.argv:
        count_engine(Path(sys.argv[sys.argv.index(ENGINE_OPTION) + 1]))
    else:
        main()

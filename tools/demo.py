"""Quire in one minute: a server, several concurrent clients, and the engine's counters.

Starts `quire serve` with the built-in model on a free port, sends requests with the `openai` client, shows
the answers as they stream, then the figures of each request and the engine's counters, and stops the server.

    python tools/demo.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MODEL = "mini"
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 30.0  # seconds
COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")

SYSTEM = """\
You are Quire, a small language model that answers questions about serving. Answer briefly. Be polite and
precise. The user is a developer who knows Python. Do not use lists or headings in the answer. Use plain
words. Do not make up facts. Our company sells paper, ink and pencils in twelve countries. The help desk
opens at nine in the morning and closes at six in the evening. This prompt is shared by all conversations,
so that its cache can be reused. Numbers are written with digits. Prefer short words to long ones.\
""".replace("\n", " ")

LISTING = """\
{lines}
The river was low that summer and the boats stayed in the harbour.
"""
VALUES = {"runala": 922, "naba": 3390, "sige": 2108, "zute": 5392, "kere": 8072, "posa": 3947, "godita": 7094}


class DemoError(Exception):
    """The demonstration failed; the message says where."""


@dataclass
class Job:
    """One request and its answer so far. Times are in seconds on one clock."""

    label: str
    question: str
    kind: str  # "chat" or "completion"
    body: dict[str, Any]
    stream: bool = True
    after: Job | None = None  # sent after the first token of this job
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    sent: float = 0.0
    first: float = 0.0
    done: float = 0.0
    started_answering: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, text: str) -> None:
        """Add a piece of the answer."""
        if text and not self.first:
            self.first = time.perf_counter()
            self.started_answering.set()
        self.text += text

    def finish(self, usage: Any) -> None:
        """Record the token counts at the end of the answer."""
        self.done = time.perf_counter()
        self.prompt_tokens = usage.prompt_tokens
        self.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        self.cached_tokens = (details and details.cached_tokens) or 0


def chat(
    label: str, question: str, *, system: str = "", context: str = "", stream: bool = True, **body: Any
) -> Job:
    """Return a chat request; `context` precedes the question."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": context + question})
    body = {"messages": messages, "max_tokens": 80, "temperature": 0, **body}
    return Job(label, question, "chat", body, stream)


def completion(label: str, question: str, *, stream: bool = True, **body: Any) -> Job:
    """Return a completion request whose prompt is formatted like the model's chat template."""
    prompt = f"<|user|>{question}<|end|><|assistant|>"
    body = {"prompt": prompt, "max_tokens": 80, "temperature": 0, **body}
    return Job(label, question, "completion", body, stream)


def jobs() -> list[Job]:
    """Return the requests of the demonstration."""
    listing = LISTING.format(lines="\n".join(f"{key}: {value}" for key, value in VALUES.items()))
    first = chat("shared prompt, first", "What is a KV block?", system=SYSTEM)
    second = chat("shared prompt, second", "What is chunked prefill?", system=SYSTEM)
    second.after = first
    return [
        first,
        second,
        chat("question", "What is continuous batching?"),
        chat("addition, not streamed", "What is 27 + 58?", stream=False),
        chat("look-up in a list", "What is the value of zute?", context=listing),
        completion("reverse, completion", "Reverse: q u i r e"),
        completion("copy, not streamed", "Copy: p a g e d", stream=False),
        chat("sampled, seed 7", "What is a block table?", temperature=0.7, seed=7),
    ]


class Server:
    """`quire serve` in its own process, which ends with the context.

    Raises:
        DemoError: it does not start; the message has its log.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "quire.cli.main", "serve", MODEL, "--port", "0"]
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> Server:
        try:
            if not self._ready.wait(START_TIMEOUT) or not self.url:
                raise DemoError("the server did not start; its log:\n" + "".join(self.log))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def stop(self) -> None:
        """Stop the server with SIGTERM, as a service manager does.

        Raises:
            DemoError: it does not stop in time, or not with status 0.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the server is still running {STOP_TIMEOUT:.0f} s after SIGTERM") from None
        if status:
            raise DemoError(f"the server ended with status {status}; its log:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            found = re.match(r"Ready: (\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()  # the server has ended: stop waiting

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


async def run_job(client: AsyncOpenAI, job: Job) -> None:
    """Send one request and receive its answer."""
    if job.after:
        await job.after.started_answering.wait()
    create = client.chat.completions.create if job.kind == "chat" else client.completions.create
    options = {"stream_options": {"include_usage": True}} if job.stream else {}
    job.sent = time.perf_counter()
    try:
        response = await create(model=MODEL, stream=job.stream, **options, **job.body)
        if job.stream:
            async for chunk in response:
                for choice in chunk.choices:
                    job.receive((choice.delta.content if job.kind == "chat" else choice.text) or "")
                if chunk.usage:
                    job.finish(chunk.usage)
        else:
            choice = response.choices[0]
            job.receive((choice.message.content if job.kind == "chat" else choice.text) or "")
            job.finish(response.usage)
    finally:
        job.started_answering.set()  # a failure must not leave another job waiting
    if not job.text.strip() or not job.done:
        raise DemoError(f"{job.label!r} got no complete answer")


async def run_jobs(url: str, all_jobs: list[Job], console: Console) -> None:
    """Send all requests concurrently and show the answers as they stream."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with shown(all_jobs, console) as finished:

            async def run(job: Job) -> None:
                await run_job(client, job)
                finished(job)

            async with asyncio.TaskGroup() as group:
                for job in all_jobs:
                    group.create_task(run(job))


@contextlib.contextmanager
def shown(all_jobs: list[Job], console: Console) -> Iterator[Callable[[Job], None]]:
    """Show a panel per request with its streaming answer; without a terminal, a line per answer."""
    if console.is_terminal:
        with Live(get_renderable=lambda: panels(all_jobs), console=console, refresh_per_second=20):
            yield lambda job: None
    else:
        yield lambda job: console.print(f"{title(job)}\n  {job.text.strip()}", markup=False, soft_wrap=True)


def title(job: Job) -> str:
    """Return the title of an answer."""
    return f"{job.label}: {job.question}"


def panels(all_jobs: list[Job]) -> Group:
    """Return the panels of all requests."""
    return Group(
        *(
            Panel(
                Text(job.text.strip() or "…"), title=Text(title(job)), title_align="left", border_style=color
            )
            for job, color in zip(all_jobs, itertools.cycle(COLORS), strict=False)
        )
    )


def job_table(all_jobs: list[Job]) -> Table:
    """Return a table with the figures of each request."""
    table = Table(title="Requests", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("request", no_wrap=True)
    for column in ("prompt tokens", "cached", "TTFT ms", "output tokens", "tokens/s"):
        table.add_column(column, justify="right")
    for job in all_jobs:
        seconds = job.done - job.sent
        table.add_row(
            job.label,
            str(job.prompt_tokens),
            str(job.cached_tokens),
            f"{(job.first - job.sent) * 1000:.0f}" if job.stream else "-",
            str(job.output_tokens),
            f"{job.output_tokens / seconds:.0f}",
        )
    return table


def engine_counters(url: str) -> dict[str, float]:
    """Return the unlabelled metrics of the server by name."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


def blocks_in_use(counters: dict[str, float]) -> int:
    """Return how many KV blocks are in use."""
    return int(counters["quire_kv_blocks"] - counters["quire_kv_blocks_free"])


def engine_table(before: dict[str, float], after: dict[str, float]) -> Table:
    """Return a table of the engine's counters over all requests."""
    table = Table(title="Engine", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for label, name in (
        ("steps", "quire_engine_steps_total"),
        ("tokens computed", "quire_scheduled_tokens_total"),
        ("prefix-cache hit tokens", "quire_prefix_cache_hit_tokens_total"),
        ("preemptions", "quire_preemptions_total"),
    ):
        table.add_row(label, f"{after[name] - before[name]:,.0f}")
    table.add_row("KV blocks in use before", f"{blocks_in_use(before):,} of {before['quire_kv_blocks']:,.0f}")
    table.add_row("KV blocks in use after", f"{blocks_in_use(after):,} of {after['quire_kv_blocks']:,.0f}")
    return table


def check(all_jobs: list[Job], before: dict[str, float], after: dict[str, float]) -> None:
    """Raise `DemoError` if blocks are still in use, or the shared prompt was computed twice."""
    for when, counters in (("before", before), ("after", after)):
        if blocks_in_use(counters):
            raise DemoError(
                f"{blocks_in_use(counters)} KV blocks were in use {when} the requests; there should be none"
            )
    sharing = [job for job in all_jobs if job.after]
    if not all(job.cached_tokens for job in sharing):
        raise DemoError("the second request with the shared prompt found nothing in the prefix cache")


def demonstrate(console: Console) -> None:
    """Run the demonstration."""
    started = time.perf_counter()
    all_jobs = jobs()
    with Server() as server:
        console.print(
            f"[bold]quire serve {MODEL}[/] is ready at {server.url} after "
            f"{time.perf_counter() - started:.1f} s; sending {len(all_jobs)} requests at once",
            soft_wrap=True,
        )
        before = engine_counters(server.url)
        asyncio.run(run_jobs(server.url, all_jobs, console))
        after = engine_counters(server.url)
        console.print(job_table(all_jobs), engine_table(before, after))
        check(all_jobs, before, after)
        server.stop()
    console.print("The server has stopped with status 0.")


def main() -> int:
    """Run the demonstration; return the exit status."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # leave all contexts, which ends the server
    console = Console(highlight=False)
    failures: list[BaseException] = []
    try:
        demonstrate(console)
    except* (DemoError, OpenAIError, httpx.HTTPError) as group:
        failures.extend(group.exceptions)
    except* KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    for failure in failures:
        Console(stderr=True).print(f"[red]the demonstration failed:[/] {failure}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

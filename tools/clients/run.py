"""Real clients against `quire serve mini`, `mini-embed` and a reranker, as tables in docs/clients.md.

Each client of clients.toml is installed into an environment of its own, .clients/NAME, and what it
wrote is kept in .clients/NAME.log. A script prints one JSON object: for each of the checks that
the client offers "yes", or the reason why not.

    python tools/clients/run.py                     # all, and the table is written
    python tools/clients/run.py openai-3 anthropic  # these only
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".clients"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin: {}, written by make clients -->", "<!-- end -->"
# Each table: the models of its clients, and what these may offer.
TABLES = {
    "generation": (("mini",), ("text", "streaming", "tools", "structured output", "second turn")),
    "embeddings": (
        ("mini-embed", "reranker"),
        ("embeddings", "dimensions", "search", "evaluation", "rerank"),
    ),
}
NOT_OFFERED = "\N{EN DASH}"
AT_ONCE = 2
# No client asks other hosts than the server.
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 30.0  # seconds
INSTALL_TIMEOUT = 1800.0  # seconds
SCRIPT_TIMEOUT = 600.0  # seconds


class ClientError(Exception):
    """A client could not be installed or did not report; the message says why."""


@dataclass(frozen=True)
class Client:
    """One row of clients.toml."""

    name: str
    title: str
    packages: Sequence[str]
    script: str
    model: str = "mini"
    npm: bool = False
    without: Sequence[str] = ()

    @property
    def environment(self) -> Path:
        """The directory that everything of this client is in."""
        return ENVIRONMENTS / self.name

    @property
    def version(self) -> str:
        """The pinned version of the client itself."""
        return re.split("==|@", self.packages[0])[-1]


def read_clients() -> dict[str, Client]:
    """The clients of clients.toml by name."""
    rows = tomllib.loads((HERE / "clients.toml").read_text())["clients"]
    return {name: Client(name, **row) for name, row in rows.items()}


def run(command: list[str], log: Path, timeout: float, **options: object) -> str:
    """Run a command, with its standard error appended to a log, and return its standard output.

    Raises:
        ClientError: it fails, or takes longer than `timeout` seconds; its processes are ended.
    """
    with log.open("a") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True, **options
        )
        try:
            written, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ClientError(f"took longer than {timeout:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        file.write(written)
    if process.returncode:
        raise ClientError(f"ended with status {process.returncode}")
    return written


def install(client: Client, log: Path) -> None:
    """Make the environment, unless it is there with the same packages.

    Raises:
        ClientError: a package cannot be installed.
    """
    done = client.environment / "installed"
    wanted = "\n".join([*client.packages, *client.without])
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(client.environment, ignore_errors=True)
    client.environment.mkdir(parents=True)
    if client.npm:
        quiet = ["--silent", "--no-audit", "--no-fund"]
        run(
            ["npm", "install", *quiet, "--prefix", str(client.environment), *client.packages],
            log,
            INSTALL_TIMEOUT,
        )
    else:
        run([sys.executable, "-m", "venv", str(client.environment)], log, INSTALL_TIMEOUT)
        pip = [str(client.environment / "bin" / "pip"), "-q", "--disable-pip-version-check"]
        run([*pip, "install", *client.packages], log, INSTALL_TIMEOUT)
        if client.without:
            run([*pip, "uninstall", "-y", *client.without], log, INSTALL_TIMEOUT)
    done.write_text(wanted)


def command_of(client: Client) -> list[str]:
    """The command that runs the client's script in its environment."""
    script = HERE / "scripts" / client.script
    if not client.npm:
        return [str(client.environment / "bin" / "python"), str(script)]
    for module in (HERE / "scripts").glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(module, client.environment)
    return ["node", str(client.environment / client.script)]


def checked(client: Client, url: str) -> dict[str, str]:
    """The outcome of each check that the client offers: "yes", or the reason why not."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    log = ENVIRONMENTS / f"{client.name}.log"
    log.write_text("")
    began = time.monotonic()
    try:
        install(client, log)
        given = {"QUIRE_URL": url, "QUIRE_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
        variables = {**os.environ, **OFFLINE, **given}
        written = run(command_of(client), log, SCRIPT_TIMEOUT, env=variables, cwd=client.environment)
        outcome = json.loads(written.splitlines()[-1])
    except (ClientError, ValueError, IndexError) as error:
        outcome = {"report": f"none: {error}"}
    failed = {check: reason for check, reason in outcome.items() if reason != "yes"}
    seconds = f"{time.monotonic() - began:.0f} s"
    print(
        f"{client.name} ({seconds}): " + (f"{failed}, see {log.relative_to(ROOT)}" if failed else "yes"),
        flush=True,
    )
    return outcome


@contextmanager
def serving(model: str) -> Iterator[str]:
    """`quire serve MODEL`, which always chooses the most likely token, for as long as the context; its URL.

    Raises:
        ClientError: it does not start.
    """
    log, path = ENVIRONMENTS / f"server-{model}.log", model
    if model == "reranker":
        path = str(make_reranker(ENVIRONMENTS / "reranker"))
    command = [sys.executable, "-m", "quire.cli.main", "serve", path, "--port", "0"]
    command += ["--served-model-name", model]
    command += ["--override-generation-config", json.dumps({"temperature": 0})]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield wait_until_ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()


def make_reranker(path: Path) -> Path:
    """Save a small reranker with random weights, and the tokenizer of `mini-embed`; return its folder."""
    import torch
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertForSequenceClassification

    folder = ROOT / "src" / "quire" / "mini-embed"
    torch.manual_seed(0)
    config = ModernBertConfig.from_pretrained(folder, num_labels=1)
    ModernBertForSequenceClassification(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that a server says in its log when it is ready.

    Raises:
        ClientError: it ends, or takes longer than START_TIMEOUT.
    """
    end = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < end:
        if found := re.search(r"^Ready: (\S+)", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise ClientError("the server did not start; its log:\n" + log.read_text())


def table(
    clients: Mapping[str, Client], outcomes: Mapping[str, Mapping[str, str]], checks: Sequence[str]
) -> str:
    """The outcomes in Markdown: a row for each client, and the reasons of what is not "yes"."""
    lines = [f"| client | version | {' | '.join(checks)} |", "|---" * (2 + len(checks)) + "|"]
    reasons = []
    for name, outcome in outcomes.items():
        client = clients[name]
        words = {"yes": "yes", None: NOT_OFFERED}
        cells = [words.get(outcome.get(check), "no") for check in checks]
        lines.append(f"| {client.title} | {client.version} | {' | '.join(cells)} |")
        reasons += [f"- {client.title}, {check}: {said}" for check, said in outcome.items() if said != "yes"]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def write_table(name: str, text: str) -> None:
    """Put a table into its place in docs/clients.md."""
    begin = BEGIN.format(name)
    before, rest = PAGE.read_text().split(begin)
    _, after = rest.split(END, maxsplit=1)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}")


def outcomes_of(clients: Sequence[Client], model: str) -> dict[str, dict[str, str]]:
    """The outcomes of the clients of a model, by name, against one server of it."""
    chosen = [client for client in clients if client.model == model]
    if not chosen:
        return {}
    with serving(model) as url, ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda client: checked(client, url), chosen)
        return {client.name: outcome for client, outcome in zip(chosen, found, strict=True)}


def main() -> int:
    """Run the clients that are asked for; 1 if a check fails."""
    clients = read_clients()
    parser = argparse.ArgumentParser(description="Real clients against servers of small models")
    parser.add_argument("names", nargs="*", metavar="CLIENT", help="of " + ", ".join(clients))
    asked = parser.parse_args().names
    if unknown := [name for name in asked if name not in clients]:
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(clients)}")
    chosen = [clients[name] for name in asked or clients]
    ENVIRONMENTS.mkdir(exist_ok=True)
    said = set[str]()
    for name, (models, checks) in TABLES.items():
        outcomes = {key: one for model in models for key, one in outcomes_of(chosen, model).items()}
        said.update(word for outcome in outcomes.values() for word in outcome.values())
        if outcomes:
            text = table(clients, outcomes, checks)
            print(text)
            if not asked:
                write_table(name, text)
    return int(not said <= {"yes"})


if __name__ == "__main__":
    sys.exit(main())

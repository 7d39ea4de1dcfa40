"""Attacks with the bodies of requests: long ones, and those that take long to prepare.

    python benchmarks/attacking_requests.py NAME PORT

runs one attack on a server of this machine once standard input has a line, and prints as JSON how often the
attacker saw which status, and how long its small request took. `attacks.py` runs it as a process of its own,
which prints a line when the bodies are made: a million ids take longer to write than what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

MOST = 60.0  # seconds after which an attack that has no answer counts as unanswered


@dataclasses.dataclass
class Attack:
    """Requests to one path, which are sent at once."""

    path: str
    bodies: Sequence[bytes]
    last: bytes | None = None  # a small request of the same tenant, whose time is measured


def completion(**fields: object) -> bytes:
    """Return the body of a request for a completion."""
    return json.dumps({"model": "mini", "max_tokens": 64, "ignore_eos": True, **fields}).encode()


def _chat(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "mini", "max_tokens": 8, "messages": messages}).encode()


def _nearly_matched_stop_strings() -> list[str]:
    """Return stop strings of 32 kB altogether that begin alike, as long as the limit of them allows."""
    return ["e" * (1000 - index) + "a" + "e" * 1000 for index in range(16)]


def _grammars(specs: list[dict[str, object]]) -> Attack:
    bodies = [completion(prompt="a", ignore_eos=False, structured_outputs=spec) for spec in specs]
    regex = {"regex": "[a-d]{1,9}"}
    small = completion(prompt="a", ignore_eos=False, max_tokens=4, structured_outputs=regex)
    return Attack("completions", bodies, last=small)


def _all_of(pieces: Sequence[str]) -> dict[str, object]:
    """Return a schema whose regular expressions take minutes to combine."""
    patterns = [{"type": "string", "pattern": f"^.*{piece}.*$"} for piece in pieces]
    return {"json": json.dumps({"allOf": patterns})}


SIZE = 4_000_000  # characters; requests may have 4 MiB

REQUEST_ATTACKS: dict[str, Callable[[], Attack]] = {
    "prompt of 4 MB, words": lambda: Attack(
        "completions", [completion(prompt="hello world " * (SIZE // 12))]
    ),
    "prompt of 4 MB, one word": lambda: Attack("completions", [completion(prompt="a" * SIZE)]),
    "prompt of 4 MB, line ends": lambda: Attack("completions", [completion(prompt="\n" * (SIZE // 2))]),
    "three prompts of 4 MB": lambda: Attack("completions", [completion(prompt="a b 1" * (SIZE // 5))] * 3),
    "prompt of 1.3 million ids": lambda: Attack("completions", [completion(prompt=[12] * (SIZE // 4))]),
    "chat of 4 MB": lambda: Attack(
        "chat/completions", [_chat([{"role": "user", "content": "hello world " * (SIZE // 12)}])]
    ),
    "chat of 110,000 messages": lambda: Attack(
        "chat/completions", [_chat([{"role": "user", "content": "a"}] * 110_000)]
    ),
    "stop strings of 32 kB": lambda: Attack(
        "completions",
        [
            completion(prompt="e" * 64, n=16, max_tokens=256, stop=_nearly_matched_stop_strings(), seed=index)
            for index in range(8)
        ],
    ),
    "bad_words of 256 x 15 kB": lambda: Attack(
        "completions",
        [completion(prompt="a", bad_words=[f"{index} " + "hello " * 2500 for index in range(256)])],
    ),
    "template bomb": lambda: Attack(
        "chat/completions", [_chat([{"role": "user", "content": "a"}] * 700)] * 3
    ),
    "40 regex bombs": lambda: _grammars([_all_of([f"{n}ab" * k for k in range(24)]) for n in range(40)]),
    "hostile schema": lambda: _grammars([_all_of(["ab" * k for k in range(60)])]),
    "1,024 prompts x n=4": lambda: Attack(
        "completions", [completion(prompt=[f"Tell me {index}" for index in range(1024)], n=4, max_tokens=4)]
    ),
}


async def _status_of(port: int, path: str, body: bytes) -> str:
    """Send one of the attack's requests; return the status of the answer, once it is complete."""
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        async with asyncio.timeout(MOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(head.encode() + body)
                answer = await reader.read()
    except TimeoutError:
        return "none"
    except ConnectionError:
        return "reset"
    return answer.split(maxsplit=2)[1].decode() if answer else "closed"


async def _seconds_of_last(port: int, attack: Attack) -> float | None:
    """Return how long the attack's small request takes; infinite: it fails, None: there is none."""
    if attack.last is None:
        return None
    await asyncio.sleep(0.2)  # so that all others have arrived
    started = time.perf_counter()
    status = await _status_of(port, attack.path, attack.last)
    return time.perf_counter() - started if status == "200" else math.inf


async def _run(port: int, attack: Attack) -> dict[str, object]:
    sent = [asyncio.create_task(_status_of(port, attack.path, body)) for body in attack.bodies]
    last_seconds = await _seconds_of_last(port, attack)
    return {"seen": Counter(await asyncio.gather(*sent)), "last_seconds": last_seconds}


def main() -> None:
    """Run the attack that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("attack", choices=REQUEST_ATTACKS)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    attack = REQUEST_ATTACKS[options.attack]()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_run(options.port, attack))))


if __name__ == "__main__":
    main()

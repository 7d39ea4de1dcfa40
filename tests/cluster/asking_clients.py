"""Clients that ask without pause for answers that are known beforehand, and count what they get."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from network_namespaces import enter

from quire import LLM, SamplingParams

ANSWER_LIMIT = 90.0  # seconds that a client waits at most: three engines, each with its time limits
NUM_PROMPTS = 24
MAX_TOKENS = 24

Expected = tuple[str, list[float]]


class Clients:
    """Clients in threads, which are in a network namespace.

    Args:
        number: how many ask at a time.
        expected: answers by prompt.
        namespace: where they are.
        address: host and port that they ask.
        hidden: names that are left out of errors, so that the same errors are counted together.

    Attributes:
        counts: numbers of answers that were right, and of errors.
        errors: errors that name a cause, by their words.
        violations: what must never happen.
        longest: the longest time that a client has waited, in seconds.
        longest_pause: the longest time between two events of a stream, in seconds.
    """

    def __init__(
        self,
        number: int,
        expected: dict[str, Expected],
        namespace: str,
        address: tuple[str, int],
        hidden: tuple[str, ...],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[str] = []
        self.longest = self.longest_pause = 0.0
        self._expected = expected
        self._namespace = namespace
        self._address = address
        self._hidden = hidden
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in range(number)]

    def begin(self) -> None:
        """Let them ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell them not to ask again."""
        self._stop.set()

    def join(self) -> None:
        """Wait for their last answers."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def so_far(self) -> str:
        """Return how many answers have been right, and how many were errors."""
        return f"{self.counts['right']} right, {self.counts['error']} errors"

    def report(self) -> str:
        """Return what they have got."""
        rows = [
            f"{self.counts['right']} answers right, {len(self.violations)} wrong; "
            f"{self.counts['error']} errors that name a cause:",
            *(f"  {count} x {message}" for message, count in self.errors.most_common()),
            f"no client waited for more than {self.longest:.1f} s, "
            f"and no stream paused for more than {self.longest_pause:.1f} s",
        ]
        return "\n".join(rows)

    def _ask(self, number: int) -> None:
        enter(self._namespace)
        rng = random.Random(number)
        while not self._stop.is_set():
            prompt = rng.choice(list(self._expected))
            began = time.monotonic()
            try:
                outcome = self._outcome(prompt, streamed=rng.random() < 0.5)
            except TimeoutError:
                outcome = "no answer in time"
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome = f"{type(error).__name__}: {error}"
            self.longest = max(self.longest, time.monotonic() - began)
            self._note(outcome)

    def _note(self, outcome: str) -> None:
        if outcome == "right":
            self.counts["right"] += 1
        elif outcome.startswith("error: "):
            self.counts["error"] += 1
            self.errors[outcome.removeprefix("error: ")] += 1
        else:
            self.violations.append(outcome)

    def _outcome(self, prompt: str, *, streamed: bool) -> str:
        """Return "right", or "error: " and what the answer says; anything else is a violation."""
        body = {"model": "mini", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1}
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_LIMIT)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": streamed}), headers)
        response = connection.getresponse()
        data = b"".join(timed(response, self._note_pause)).decode()
        connection.close()
        if response.status != 200:
            self._stop.wait(float(response.headers.get("Retry-After", 0)))
            return self._named_error(json.loads(data))
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        answers = events if streamed else [json.loads(data)]
        if "error" in answers[-1]:
            return self._named_error(answers[-1])
        if streamed and not data.rstrip().endswith("data: [DONE]"):
            return "a stream ended without an end"
        choices = [answer["choices"][0] for answer in answers if answer["choices"]]
        text = "".join(choice["text"] for choice in choices)
        logprobs = [
            one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["token_logprobs"]
        ]
        return "right" if (text, logprobs) == self._expected[prompt] else f"wrong: {text!r}"

    def _note_pause(self, seconds: float) -> None:
        self.longest_pause = max(self.longest_pause, seconds)

    def _named_error(self, answer: dict[str, Any]) -> str:
        """Return what an error says, without what differs from one to the next."""
        message = answer["error"]["message"]
        if not message:
            return "an error without a message"
        for name in (*self._hidden, "10.83.0."):
            message = message.replace(name, "")
        return "error: " + " ".join(message.split()[:14])


def timed(response: http.client.HTTPResponse, note_pause: Callable[[float], None]) -> Iterator[bytes]:
    """Yield the lines of a response, and note how long each but the first was waited for."""
    read_at = None
    for line in response:
        now = time.monotonic()
        if read_at is not None:
            note_pause(now - read_at)
        yield line
        read_at = now


def expected_answers(rng: random.Random) -> dict[str, Expected]:
    """Return prompts of 60 to 700 tokens, and their answers by one engine."""
    words = ["one", "two", "three", "seven", "nine", "ten", "red", "green", "blue", "small", "large", "old"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(40, 400))) for _ in range(NUM_PROMPTS)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=1)
    with LLM("mini", num_threads=1, num_kv_blocks=512) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return {
        prompt: (
            output.text,
            [
                position[token].logprob
                for position, token in zip(output.logprobs, output.token_ids, strict=True)
            ],
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    }

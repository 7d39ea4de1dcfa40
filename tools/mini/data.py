"""Generated training and evaluation data for `mini`: four kinds of task, all as chat turns.

qa         answers a question about Quire or serving, from questions_*.toml
add        adds two numbers of up to two digits
copy       repeats letters; `reverse` writes them backwards
retrieval  finds the value of a key in a list within a long prompt

Everything is drawn from one `random.Random`, so the seed determines the data.  Held-out examples are never
trained on: the `held_out` paraphrase of each question, and one in ten number pairs, strings and key names,
chosen by a hash.
"""

from __future__ import annotations

import random
import re
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tokenizer import SYLLABLES, ChatEncoder

HERE = Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz"

ADD_FORMS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "{a}+{b}",
    "What is {a}+{b}?",
)
COPY_FORMS = ("Copy: {s}", "Repeat: {s}", "Copy this: {s}", "Repeat after me: {s}")
REVERSE_FORMS = ("Reverse: {s}", "Backwards: {s}", "Reverse this: {s}", "Write backwards: {s}")
LOOKUP_FORMS = (
    "What is {k}?",
    "What is the value of {k}?",
    "Look up {k}.",
    "Give me the value of {k}.",
    "{k}?",
    "Find {k} in the list.",
)
LEAD_INS = (
    "Please: ",
    "Hey, ",
    "Hi, ",
    "Hello! ",
    "OK, ",
    "So, ",
    "Tell me: ",
    "Quick question: ",
    "One more thing: ",
    "Question: ",
    "I have a question. ",
    "Sorry, ",
    "And ",
    "please ",
)
# Beginnings and endings of questions for a definition, and replacements for them.
DEFINITION = re.compile(
    r"^(What is meant by|What is|What are|Define|Explain the term|Explain|Describe|Tell me about"
    r"|Help me understand|Give me a short definition of|How would you describe|So what exactly is"
    r"|Please explain) "
    r"|: what is (it|that)( for)?(?=[?.]?$)|, in one sentence(?=[?.]?$)"
)
OPENINGS = (
    *("", "Describe ", "Describe the ", "Describe how ", "Describe what ", "Tell me about ", "Tell me what "),
    *("Tell me why ", "Explain ", "Define ", "What is ", "Please explain ", "In short, "),
)
ENDINGS = ("", "?", ".", ": what is it?", ", in one sentence?", " works.", " means.", " is.", " is for.")
TAILS = (" please", " Please.", " Thanks.", " thank you", " Be brief.")


def is_held_out(text: str) -> bool:
    """Whether `text` (a pair, a string, a name) is held out for evaluation: one in ten is."""
    return zlib.crc32(text.encode()) % 10 == 0


@lru_cache(maxsize=1)
def plain_texts() -> dict[str, list[str]]:
    """System sentences, fillers and list introductions from texts.toml."""
    return tomllib.loads((HERE / "texts.toml").read_text())


@lru_cache(maxsize=1)
def questions() -> list[dict]:
    """All entries of questions_*.toml: `ask` (paraphrases), `held_out`, `answer`.

    If two entries share a question, the later one takes the answer of the earlier one. A paraphrase that is
    held out in one entry is not used in any other.
    """
    files = sorted(HERE.glob("questions_*.toml"))
    entries = [entry for f in files for entry in tomllib.loads(f.read_text())["entry"]]
    answers: dict[str, str] = {}
    for entry in entries:
        asked = [a.lower() for a in (*entry["ask"], entry["held_out"])]
        entry["answer"] = next((answers[a] for a in asked if a in answers), entry["answer"])
        answers.update((a, entry["answer"]) for a in asked if a not in answers)
    held_out = {entry["held_out"].lower() for entry in entries}
    for entry in entries:
        entry["ask"] = [ask for ask in entry["ask"] if ask.lower() not in held_out]
    return entries


def tokenizer_corpus() -> Iterator[str]:
    """Text from which the tokenizer learns its merges, without held-out questions."""
    for entry in questions():
        for ask in entry["ask"]:
            yield ask
            yield ask[0].lower() + ask[1:]
        yield from [entry["answer"]] * 3
    forms = (*ADD_FORMS, *COPY_FORMS, *REVERSE_FORMS, *LOOKUP_FORMS, *LEAD_INS, *TAILS)
    for text in (*forms, *plain_texts()["list_intro"]):
        yield from [text.replace("{k}", "").replace("{s}", "")] * 20
    for text in (*plain_texts()["system"], *plain_texts()["filler"]):
        yield from [text] * 3


@dataclass
class Turn:
    """One question and its answer.  `task` is the task it is scored under."""

    task: str
    user: str
    answer: str


@dataclass
class Example:
    """One conversation as token ids.  A span (start, end, task) marks an answer with its <|end|>."""

    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, str]] = field(default_factory=list)


class TaskSampler:
    """Draws turns; with `held_out` only held-out ones, otherwise none of these."""

    def __init__(self, rng: random.Random, *, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out
        self.colon_share = 0.5  # of lists, written "bako: 4821"; the others are written "bako 4821"
        self.reopen = 0.0  # share of questions with another opening and ending
        self.words = sorted({w for e in questions() for a in e["ask"] for w in a.split()})

    def turn(self, task: str) -> Turn:
        """A turn of one of the short tasks."""
        return getattr(self, task)()

    def qa(self) -> Turn:
        """A question in one of its training paraphrases, with noise, so that unseen ones are understood."""
        entry = self.rng.choice(questions())
        question = self.rng.choice(entry["ask"])
        if self.rng.random() < self.reopen:
            question = self._reopen(question)
        return Turn("qa", self._add_noise(question), entry["answer"])

    def add(self) -> Turn:
        """An addition.  a + b and b + a are held out together; numbers below ten are never held out."""
        rng = self.rng
        while True:
            low = 10 if self.held_out or rng.random() < 0.9 else 0
            a, b = rng.randint(low, 99), rng.randint(low, 99)
            if (min(a, b) >= 10 and is_held_out(f"{min(a, b)}+{max(a, b)}")) == self.held_out:
                return Turn("add", rng.choice(ADD_FORMS).format(a=a, b=b), str(a + b))

    def copy(self) -> Turn:
        """Letters to repeat."""
        text = " ".join(self._letters())
        return Turn("copy", self.rng.choice(COPY_FORMS).format(s=text), text)

    def reverse(self) -> Turn:
        """Letters to write backwards."""
        text = " ".join(self._letters())
        return Turn("reverse", self.rng.choice(REVERSE_FORMS).format(s=text), text[::-1])

    def lookup(self, key: str, line: str) -> Turn:
        """A question for one key of a list.  The answer is its line in the list."""
        return Turn("retrieval", self.rng.choice(LOOKUP_FORMS).format(k=key), line)

    def _letters(self) -> str:
        """3-8 random letters."""
        while True:
            letters = "".join(self.rng.choices(LETTERS, k=self.rng.randint(3, 8)))
            if is_held_out(letters) == self.held_out:
                return letters

    def _reopen(self, text: str) -> str:
        """The same question with another opening: "Define X." may become "Describe how X works."."""
        core, count = DEFINITION.subn("", text)
        if not count:
            opening = self.rng.choice(
                ("Describe ", "Tell me ", "Explain ", "Describe how ", "Please tell me ")
            )
            return opening + text[0].lower() + text[1:].rstrip("?.")
        core = core.rstrip("?.")
        if self.rng.random() < 0.5:
            core = re.sub("^(an?|the) ", "", core)
        return self.rng.choice(OPENINGS) + core + self.rng.choice(ENDINGS)

    def _add_noise(self, text: str) -> str:
        """`text` as typed in a hurry: words missing or changed, lower case, lead-ins."""
        rng = self.rng
        if rng.random() < 0.5:
            rate = rng.random() * 0.25
            words = [rng.choice(self.words) if rng.random() < rate / 3 else w for w in text.split()]
            text = " ".join(w for w in words if rng.random() >= rate) or text
        if rng.random() < 0.3:
            text = text.rstrip("?.")
        if rng.random() < 0.3:
            text = rng.choice(LEAD_INS) + text[0].lower() + text[1:]
        if rng.random() < 0.1:
            text += rng.choice(TAILS)
        return text.lower() if rng.random() < 0.3 else text

    def name(self) -> str:
        """A made-up name of two syllables, sometimes three."""
        while True:
            name = "".join(self.rng.choices(SYLLABLES, k=2 if self.rng.random() < 0.7 else 3))
            if is_held_out(name) == self.held_out:
                return name

    def lines(self, count: int) -> dict[str, str]:
        """`count` different names, each with its line of the list; values have three or four digits."""
        separator = ": " if self.rng.random() < self.colon_share else " "
        found: dict[str, str] = {}
        while len(found) < count:
            name = self.name()
            found[name] = f"{name}{separator}{self.rng.randint(100, 9999)}"
        return found

    def fillers(self, budget: int, encoder: ChatEncoder) -> list[str]:
        """Filler sentences of at most `budget` tokens together."""
        chosen: list[str] = []
        while True:
            sentence = self.rng.choice(plain_texts()["filler"])
            budget -= len(encoder.text(" " + sentence))
            if budget < 0:
                return chosen
            chosen.append(sentence)

    def system(self, budget: int, encoder: ChatEncoder) -> str:
        """A system prompt: most are short, some have up to 300 tokens, none more than `budget`."""
        count = self.rng.choice((1, 1, 1, 2, 2, 3, 5, 8, 12, 16, 20))
        sentences = self.rng.sample(plain_texts()["system"], count)
        while len(sentences) > 1 and len(encoder.text(" ".join(sentences))) > min(budget, 300):
            sentences.pop()
        return " ".join(sentences)

    def listing(self, tokens: int, encoder: ChatEncoder, list_share: float) -> tuple[str, dict[str, str]]:
        """A text of at most about `tokens` tokens with a list in it, and the lines of the list by name.

        `list_share` of the tokens are list lines, the rest are filler sentences before and after the list.
        """
        line_tokens = 8.0  # two or three syllables, three or four digits, newline, sometimes a colon
        lines = self.lines(max(3, int(tokens * list_share / line_tokens)))
        block = "\n".join(lines.values())
        if self.rng.random() < 0.5:
            block = self.rng.choice(plain_texts()["list_intro"]) + "\n" + block
        room = tokens - len(encoder.text(block))
        before = int(room * self.rng.random())
        after = room - before
        parts = [" ".join(self.fillers(before, encoder)), block, " ".join(self.fillers(after, encoder))]
        return "\n".join(p for p in parts if p), lines


def add_turn(example: Example, turn: Turn, encoder: ChatEncoder) -> None:
    """Append a user message and its answer to a conversation."""
    example.ids += encoder.message("user", turn.user) + encoder.generation_prompt()
    start = len(example.ids)
    example.ids += [*encoder.text(turn.answer), encoder.end]
    example.spans.append((start, len(example.ids), turn.task))


def short_conversation(
    sampler: TaskSampler, encoder: ChatEncoder, weights: dict[str, float], length: int
) -> Example:
    """A conversation of short tasks with as many whole turns as fit into `length` tokens."""
    rng, example = sampler.rng, Example()
    if rng.random() < 0.4:
        example.ids += encoder.message("system", sampler.system(length // 2, encoder))
    while True:
        turn = sampler.turn(rng.choices(list(weights), list(weights.values()))[0])
        mark = len(example.ids)
        add_turn(example, turn, encoder)
        if len(example.ids) > length:
            del example.ids[mark:], example.spans[-1]
            return example


def retrieval_conversation(
    sampler: TaskSampler, encoder: ChatEncoder, tokens: int, length: int, list_share: float
) -> Example:
    """A list of about `tokens` tokens, then questions about it until `length` tokens are full."""
    rng, example = sampler.rng, Example()
    if rng.random() < 0.3:
        example.ids += encoder.message("system", sampler.system(max(20, length // 5), encoder))
    text, lines = sampler.listing(min(tokens, length - len(example.ids) - 50), encoder, list_share)
    keys = list(lines)
    first = True
    while True:
        key = rng.choice(keys)
        turn = sampler.lookup(key, lines[key])
        turn.user = f"{text}\n{turn.user}" if first else turn.user
        mark, first = len(example.ids), False
        add_turn(example, turn, encoder)
        if len(example.ids) > length:
            del example.ids[mark:], example.spans[-1]
            return example


def prompt_tokens(messages: list[dict[str, str]], encoder: ChatEncoder) -> int:
    """Number of prompt tokens for an answer to `messages`."""
    return sum(len(encoder.message(m["role"], m["content"])) for m in messages) + 1


def retrieval_prompt(sampler: TaskSampler, encoder: ChatEncoder, target: int) -> Turn:
    """One retrieval question in a prompt of `target` tokens, give or take 5 %."""
    rng = sampler.rng
    while True:
        text, lines = sampler.listing(target - 15, encoder, rng.uniform(0.4, 1.0))
        key = rng.choice(list(lines))
        turn = sampler.lookup(key, lines[key])
        turn.user = f"{text}\n{turn.user}"
        if abs(prompt_tokens([{"role": "user", "content": turn.user}], encoder) - target) <= 0.05 * target:
            return turn


def evaluation_set(encoder: ChatEncoder, seed: int = 2026) -> list[dict]:
    """The held-out prompts: rows {"task", "messages", "answer"}; `seed` fixes them."""
    sampler = TaskSampler(random.Random(seed), held_out=True)
    rows = [("qa", e["held_out"], e["answer"]) for e in questions()]
    for task in ("add", "copy", "reverse"):
        unique: dict[str, Turn] = {}
        while len(unique) < 200:
            turn = sampler.turn(task)
            unique[turn.user] = turn
        rows += [(task, t.user, t.answer) for t in unique.values()]
    for target in (200, 600, 1400):
        turns = [retrieval_prompt(sampler, encoder, target) for _ in range(60)]
        rows += [(f"retrieval-{target}", t.user, t.answer) for t in turns]
    return [
        {"task": task, "messages": [{"role": "user", "content": user}], "answer": answer}
        for task, user, answer in rows
    ]

"""Pairs of texts that belong together, from which `mini-embed` learns, and those that it is measured on.

answers    a question of questions_*.toml and its answer, or another phrasing of it
titles     a heading of the documentation, or the name of a function in words, and the text under it
sentences  a sentence of such a text, and the others

Held out are the questions with one in ten answers, and the texts of one in ten files, by a hash, so that no
sentence around a held-out text has been seen. Of the other questions only one phrasing is held out.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from data import HERE, TaskSampler, is_held_out, questions

ROOT = HERE.parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
MODULES = ("src/quire/**/*.py", "tests/support/**/*.py", "benchmarks/*.py", "tools/**/*.py")
SHARES = {"answers": 3.0, "titles": 3.0, "sentences": 4.0}  # of training pairs
PARAPHRASES = 0.3  # share of the questions that belong to another phrasing, not to the answer
LOST_WORDS = 0.3  # most words of a query that are left out
MIN_TITLE_WORDS, MIN_TEXT_WORDS, MIN_SENTENCE_WORDS = 3, 6, 4

_CODE = re.compile(r"^```.*?^```|^(?: {4}|\|).*?$|<[^>]*>", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.?!:])\s+(?=\S)")
_WORD_START = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True)
class Pair:
    """A query and the passage that answers it; `task` is what it is measured under."""

    task: str
    query: str
    passage: str


@dataclass(frozen=True)
class Passage:
    """A text with its title, which may be empty."""

    title: str
    text: str
    held_out: bool

    @property
    def sentences(self) -> list[str]:
        """Its sentences, if each has some words; otherwise none."""
        found = _SENTENCE_END.split(self.text)
        return found if all(_num_words(one) >= MIN_SENTENCE_WORDS for one in found) else []


def _num_words(text: str) -> int:
    return len(text.split())


@lru_cache(maxsize=1)
def passages() -> list[Passage]:
    """The texts of the documentation and the docstrings, without those that occur twice."""
    found: list[Passage] = []
    for pattern in (*PAGES, *MODULES):
        for file in sorted(ROOT.glob(pattern)):
            held_out = is_held_out(str(file.relative_to(ROOT)))
            texts = _paragraphs(file) if file.suffix == ".md" else _docstrings(file)
            found += [Passage(title, text, held_out) for title, text in texts]
    counts = Counter(one.text for one in found)
    return [one for one in found if counts[one.text] == 1 and _num_words(one.text) >= MIN_TEXT_WORDS]


def _paragraphs(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of a page, the first of each section with the headings above it."""
    page = section = ""
    for block in re.split(r"\n\s*\n|\n(?=[#*-] )", _CODE.sub("", file.read_text())):
        text = " ".join(_LINK.sub(r"\1", block).replace("`", "").replace("**", "").split())
        if text.startswith("#"):
            heading = text.lstrip("# ")
            page, section = (heading, heading) if text.startswith("# ") else (page, f"{page}: {heading}")
        elif text:
            yield section, text.removeprefix("- ").removeprefix("* ")
            section = ""


def _docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a module, each with the name of what it describes, in words."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = file.stem if isinstance(node, ast.Module) else node.name
            text = ast.get_docstring(node)
            if text:
                yield (
                    " ".join(_WORD_START.split(name.strip("_"))).lower(),
                    " ".join(text.replace("`", "").split()),
                )


class PairSampler:
    """Draws training pairs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._questions = TaskSampler(rng)
        self._questions.reopen = 0.35
        self._entries = [entry for entry in questions() if not is_held_out(entry["answer"])]
        known = [one for one in passages() if not one.held_out]
        self._titled = [one for one in known if one.title]
        self._long = [one for one in known if len(one.sentences) > 1]

    def pair(self) -> Pair:
        """A pair of one of the tasks."""
        task = self.rng.choices(list(SHARES), list(SHARES.values()))[0]
        query, passage = getattr(self, f"_{task}")()
        return Pair(task, self._shortened(query), passage)

    def _answers(self) -> tuple[str, str]:
        turn = self._questions.qa()
        while is_held_out(turn.answer):
            turn = self._questions.qa()
        if self.rng.random() >= PARAPHRASES:
            return turn.user, turn.answer
        asked = self.rng.choice([e["ask"] for e in self._entries if e["answer"] == turn.answer])
        return turn.user, self.rng.choice(asked)

    def _titles(self) -> tuple[str, str]:
        chosen = self.rng.choice(self._titled)
        return chosen.title, chosen.text

    def _sentences(self) -> tuple[str, str]:
        sentences = list(self.rng.choice(self._long).sentences)
        return sentences.pop(self.rng.randrange(len(sentences))), " ".join(sentences)

    def _shortened(self, text: str) -> str:
        """A query without some of its words, so that no single one of them is relied on."""
        rate = self.rng.random() * LOST_WORDS
        return " ".join(word for word in text.split() if self.rng.random() >= rate) or text


def evaluation_pairs() -> list[Pair]:
    """The held-out pairs: one of each question and text."""
    pairs = [
        Pair("new answers" if is_held_out(entry["answer"]) else "answers", entry["held_out"], entry["answer"])
        for entry in questions()
    ]
    for one in passages():
        if not one.held_out:
            continue
        if len(one.sentences) > 1:
            pairs.append(Pair("sentences", one.sentences[0], " ".join(one.sentences[1:])))
        elif _num_words(one.title) >= MIN_TITLE_WORDS:
            pairs.append(Pair("titles", one.title, one.text))
    return pairs


def training_texts() -> Iterator[str]:
    """All texts that are not held out, from which the tokenizer learns its words."""
    for entry in questions():
        if not is_held_out(entry["answer"]):
            yield from (*entry["ask"], entry["answer"])
    for one in passages():
        if not one.held_out:
            yield from (one.title, one.text)

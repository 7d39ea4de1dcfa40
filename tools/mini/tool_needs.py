"""What `mini` is asked to do with tools: definitions, needs, the questions for these, and what tools return.

The four kinds of tools are weather, calculator, search and timer.  Words are from tools.toml.  Held out are
cities, nouns and phrasings listed there, and one in ten number pairs, durations and made-up names.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import data

KINDS = ("weather", "calculator", "search", "timer")
GAPS = {"weather": "{c}", "calculator": "{e}", "search": "{q}", "timer": "{d}"}  # in the forms of questions
NUMBER_WORDS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
OPERATORS = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "the difference of {a} and {b}"),
    "*": ("{a} * {b}", "{a}*{b}", "{a} times {b}", "{a} x {b}", "the product of {a} and {b}",
          "{a} multiplied by {b}"),
    "/": ("{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} over {b}"),
}  # fmt: skip
RESULT_KEYS = ("result", "value", "answer")
TEMPERATURE_KEYS = ("temperature", "temp", "temperature_c", "degrees", "temp_c")
SKY_KEYS = ("condition", "sky", "conditions", "weather", "description")
DONE = ("ok", "done", "true", "set", '{"status": "ok"}', '{"ok": true}', '{"set": true}', '{"status": "set"}')


@lru_cache(maxsize=1)
def words() -> dict[str, dict]:
    """The content of tools.toml."""
    return tomllib.loads((data.HERE / "tools.toml").read_text())


@dataclass(frozen=True)
class Need:
    """What a user wants of one tool: `value` is what its parameter gets."""

    kind: str
    text: str  # as it stands in a question
    value: str
    minutes: int = 0  # of a timer


@dataclass(frozen=True)
class Definition:
    """One of the four tools as a request has it; a `parameter` that is a number gets minutes."""

    kind: str
    name: str
    parameter: str
    is_number: bool
    schema: dict

    def call(self, need: Need) -> dict:
        """The call that serves `need`."""
        value = need.minutes if self.is_number else need.value
        return {"name": self.name, "arguments": {self.parameter: value}}


def function(name: str, properties: dict, required: list[str]) -> dict:
    """A tool as OpenAI's API describes it."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class ToolSampler:
    """Draws conversations with tools; with `held_out` of the sampler only held-out ones, otherwise none."""

    def __init__(self, sampler: data.TaskSampler) -> None:
        self.tasks = sampler
        self.rng = sampler.rng
        self.held_out = sampler.held_out
        self.is_lower = False  # whether the user writes all in lower case
        self.plain = 1.0 if sampler.held_out else 0.85  # share of tools with their usual name and parameter

    def words(self, kind: str, name: str) -> list[str]:
        """The words of a list in tools.toml."""
        return words()[kind][f"{name}_held_out" if self.held_out else name]

    def pick(self, kind: str, name: str) -> str:
        """One of `words`."""
        return self.rng.choice(self.words(kind, name))

    # -- definitions ---------------------------------------------------------------------------------------

    def definition(self, kind: str) -> Definition:
        """One of the four tools, sometimes with another name, parameter or optional ones."""
        rng, known = self.rng, words()[kind]
        name, parameter = known["names"][0], known["parameters"][0]
        optional: list[str] = []
        if rng.random() >= self.plain:
            name = self._new_name(known["names"]) if rng.random() < 0.7 else name
            parameter = rng.choice(known["parameters"])
            optional = self._optional()
        is_number = kind == "timer" and (parameter == "minutes" or rng.random() < 0.5)
        spec = {"type": rng.choice(("integer", "number")) if is_number else "string"}
        properties = {parameter: spec, **{one: {"type": "string"} for one in optional}}
        if rng.random() < 0.3:
            properties = dict(reversed(properties.items()))
        required = [] if rng.random() < 0.05 else [parameter]
        schema = function(name, properties, required)
        return Definition(kind, name, parameter, is_number, schema)

    def _new_name(self, names: list[str]) -> str:
        """Another name: of the list, or with a made-up part, which it always has if it is held out."""
        rng = self.rng
        name = rng.choice(names)
        if self.held_out or rng.random() < 0.5:
            extra = self.tasks.name() if self.held_out or rng.random() < 0.7 else str(rng.randint(1, 9))
            name = f"{name}_{extra}" if rng.random() < 0.6 else f"{extra}_{name}"
        return name

    def _optional(self) -> list[str]:
        known = self.words("other", "optional")
        return self.rng.sample(known, self.rng.choice((0, 0, 1, 1, 2)))

    def unneeded_tool(self) -> dict:
        """A tool that no question needs."""
        name, _, rest = self.pick("other", "tools").rstrip(")").partition("(")
        parameters = rest.split(", ") if rest else []
        return function(name, {one: {"type": "string"} for one in parameters}, parameters)

    # -- needs ---------------------------------------------------------------------------------------------

    def need(self, kind: str) -> Need:
        """Something that a tool is asked for."""
        need: Need = getattr(self, f"_{kind}")()
        if self.is_lower:
            need = Need(kind, need.text.lower(), need.value.lower(), need.minutes)
        return need

    def _city(self) -> str:
        if self.held_out or self.rng.random() < 0.35:
            return self.pick("weather", "cities")
        return self._proper_name()

    def _proper_name(self) -> str:
        """A made-up name with a capital letter."""
        ending = self.rng.choice(
            ("", "", "n", "s", "r", "rt", "ck", "lm", "nd", "berg", "ton", "ville", "y", "x")
        )
        name = (self.tasks.name() + ending if self.rng.random() < 0.6 else self._word()).capitalize()
        if self.rng.random() < 0.25:
            name = self.rng.choice("ACEHIJLOQUWXY") + name.lower()
        front = ("", "", "", "", "", "New ", "Port ", "San ", "El ", "Bad ", "Fort ", "Upper ")
        return self.rng.choice(front) + name

    def _weather(self) -> Need:
        city = self._city()
        return Need("weather", city, city)

    def _number(self) -> str:
        rng = self.rng
        digits = rng.choice((1, 1, 2, 2, 2, 2, 3, 3, 3 if self.held_out else 4))
        number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        return f"{number}.{rng.randint(1, 99)}" if rng.random() < (0.0 if self.held_out else 0.05) else number

    def _calculator(self) -> Need:
        rng = self.rng
        while True:
            a, b = self._number(), self._number()
            if data.is_held_out(f"{a} {b}") == self.held_out:
                break
        operator = rng.choice("+-**/")
        text = rng.choice(OPERATORS[operator]).format(a=a, b=b)
        value = f"{a} {operator} {b}"
        kind = 1.0 if self.held_out else rng.random()
        if kind < 0.04:
            third, other = self._number(), rng.choice("+-*/")
            text = value = f"{value} {other} {third}"
        elif kind < 0.08:
            third, other = self._number(), rng.choice("+-*/")
            text = value = f"({value}) {other} {third}"
        return Need("calculator", text, value)

    def _phrase(self, shape: str) -> str:
        """A query, or a question about the world, with its gaps filled."""
        fill: dict[str, Callable[[], str]] = {
            "{a}": lambda: self._word_or(self.rng.choice(words()["search"]["adjectives"])),
            "{n}": lambda: self._word_or(self.pick("search", "nouns")),
            "{c}": self._city,
            "{d}": self._city,
            "{l}": lambda: self.pick("search", "countries"),
            "{p}": lambda: self.pick("search", "people") if self.rng.random() < 0.5 else self._person(),
            "{w}": self._word,
            "{year}": lambda: str(self.rng.randint(1900, 2030)),
        }
        return re.sub(r"\{\w+\}", lambda gap: fill[gap[0]](), shape)

    def _word(self) -> str:
        """Any word, or the start of one with the end of another, whose tokens follow each other nowhere."""
        first, second = (
            re.sub(r"\W", "", self.rng.choice(self.tasks.words)).lower() or "word" for _ in range(2)
        )
        if self.rng.random() < 0.5:
            return first
        return first[: self.rng.randint(1, len(first))] + second[-self.rng.randint(2, 4) :]

    def _word_or(self, usual: str) -> str:
        """A usual word; in training sometimes any other, so that words are copied and not guessed."""
        return usual if self.held_out or self.rng.random() < 0.5 else self._word()

    def _person(self) -> str:
        first = self.tasks.name().capitalize()
        return f"{first} {self._proper_name()}" if self.rng.random() < 0.5 else first

    def _search(self) -> Need:
        query = self._phrase(self.pick("search", "shapes"))
        return Need("search", query, query)

    def _timer(self) -> Need:
        rng = self.rng
        while True:
            form = rng.random()
            if form < 0.7 or self.held_out:
                minutes = rng.choice((rng.randint(1, 60), rng.randint(1, 180), 5 * rng.randint(1, 24)))
                unit = "minute" if minutes == 1 else rng.choice(("minutes", "minutes", "minutes", "min"))
                text = f"{minutes} {unit}"
            elif form < 0.85:
                minutes = rng.randint(1, len(NUMBER_WORDS))
                text = f"{NUMBER_WORDS[minutes - 1]} minute" + "s" * (minutes > 1)
            else:
                hours = rng.randint(2, 6)
                fixed = (
                    ("half an hour", 30), ("an hour", 60), ("1 hour", 60), ("a quarter of an hour", 15),
                    ("an hour and a half", 90), (f"{hours} hours", 60 * hours),
                    (f"{NUMBER_WORDS[hours - 1]} hours", 60 * hours),
                )  # fmt: skip
                text, minutes = rng.choice(fixed)
            if data.is_held_out(f"{minutes} minutes") == self.held_out:
                return Need("timer", text, text, minutes)

    # -- questions -----------------------------------------------------------------------------------------

    def question(self, needs: list[Need]) -> str:
        """A question for all of `needs`."""
        kinds = [need.kind for need in needs]
        if len(needs) > 1 and len(set(kinds)) == 1 and self.rng.random() < 0.6:
            texts = [need.text for need in needs]
            joint = " and for " if kinds[0] == "search" else " and "
            return self.typed(self.pick(kinds[0], "together").replace("{all}", joint.join(texts)))
        text = ""
        for need in needs:
            form = self.rng.choice(words()[need.kind]["held_out" if self.held_out else "ask"])
            joint = self.rng.choice(words()["other"]["joints"]) if text else ""
            if joint.endswith(("and ", ", ", "then ", "also ")) and not form.startswith(("{", "I ")):
                form = form[0].lower() + form[1:]
            text = text.rstrip("?.") + joint + form.replace(GAPS[need.kind], need.text)
        return self.typed(text)

    def typed(self, text: str) -> str:
        """`text` as typed: sometimes in lower case, with a lead-in, or without the mark at its end."""
        rng = self.rng
        if self.held_out:
            return text
        if self.is_lower:
            text = text.lower()
        if rng.random() < 0.2:
            text = text.rstrip("?.")
        if rng.random() < 0.15:
            text = rng.choice(data.LEAD_INS) + text
        return text + rng.choice(data.TAILS) if rng.random() < 0.05 else text

    def whole_question(self, kind: str) -> Need | None:
        """A question that is asked without a tool in mind; None if there is none for this kind."""
        if kind == "calculator":
            turn = self.tasks.turn("add")
            return Need(kind, turn.user, " + ".join(re.findall(r"\d+", turn.user)))
        if kind != "search":
            return None
        query = self._phrase(self.pick("search", "world"))
        query = query.lower() if self.is_lower else query
        ending = "?" if self.held_out or self.rng.random() < 0.8 else ""
        return Need(kind, query + ending, query)

    # -- results -------------------------------------------------------------------------------------------

    def result(self, need: Need, called: Definition) -> tuple[str, str]:
        """What a tool returns, and the sentence that says it."""
        rng = self.rng
        if rng.random() < (0.06 if self.held_out else 0.12):
            error = self.pick("other", "errors")
            if not self.held_out and rng.random() < 0.5:
                error = f"{self._word()} {self._word()}"
            forms = (json.dumps({"error": error}), f"error: {error}", f"Error: {error}")
            return rng.choice(forms), f"That did not work: {error}."
        return getattr(self, f"_{need.kind}_result")(need, called)

    def _weather_result(self, need: Need, called: Definition) -> tuple[str, str]:
        rng = self.rng
        degrees: float | int = rng.randint(-20, 40)
        degrees = degrees + rng.randint(1, 9) / 10 if rng.random() < 0.2 else degrees
        sky = rng.choice(words()["weather"]["sky"]) if rng.random() < 0.6 else ""
        sentence = f"It is {degrees:g} degrees in {need.value}" + (f", {sky}." if sky else ".")
        if rng.random() < 0.15:
            return f"{degrees:g} degrees" + (f", {sky}" if sky else ""), sentence
        fields: list[tuple[str, object]] = [(rng.choice(TEMPERATURE_KEYS), degrees)]
        fields += [(rng.choice(SKY_KEYS), sky)] if sky else []
        if rng.random() < 0.3:
            fields.append(("city", need.value))
        if rng.random() < 0.3:
            fields.append(
                rng.choice((("wind", rng.randint(0, 40)), ("humidity", rng.randint(20, 99)), ("unit", "C")))
            )
        rng.shuffle(fields)
        return json.dumps(dict(fields)), sentence

    def _calculator_result(self, need: Need, called: Definition) -> tuple[str, str]:
        rng = self.rng
        value = self._number()
        value = f"-{value}" if rng.random() < 0.15 else value
        forms = (
            value,
            f'{{"{rng.choice(RESULT_KEYS)}": {value}}}',
            f'{{"{rng.choice(RESULT_KEYS)}": "{value}"}}',
        )
        return rng.choice(forms), f"{need.value} = {value}."

    def _search_result(self, need: Need, called: Definition) -> tuple[str, str]:
        rng = self.rng
        found = [self._finding() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        forms = (
            found[0],
            json.dumps({"results": found}),
            json.dumps(found),
            json.dumps({"result": found[0]}),
            json.dumps([{"title": one} for one in found]),
        )
        return rng.choice(forms), f"I found this: {found[0]}"

    def _finding(self) -> str:
        """A sentence that a search finds."""
        rng = self.rng
        sentence = rng.choice(data.plain_texts()["filler"])
        parts = sentence.split()
        for _ in range(rng.randint(0, 1 if self.held_out else 3)):
            new = rng.choice((self.pick("search", "nouns"), self.tasks.name(), str(rng.randint(2, 9999))))
            parts[rng.randrange(1, len(parts) - 1)] = new
        return " ".join(parts)

    def _timer_result(self, need: Need, called: Definition) -> tuple[str, str]:
        rng = self.rng
        duration = f"{need.minutes} minute" + "s" * (need.minutes != 1) if called.is_number else need.value
        done = rng.choice(
            (*DONE, json.dumps({"id": rng.randint(1, 99)}), json.dumps({"minutes": need.minutes}))
        )
        return done, f"The timer is set for {duration}."

"""GBNF, the notation of llama.cpp's grammars, read and written as Lark for llguidance.

GBNF matches characters, llguidance lexemes, each as long as possible: `[a-z]* "b"` as two lexemes never
matches `ab`. So a part of a grammar becomes one lexeme only where that changes nothing (see `conflicts_of`);
elsewhere its parts do, in the end single characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from quire.grammar.gbnf.lexemes import character_masks, conflicts_of
from quire.grammar.gbnf.nodes import (
    EMPTY,
    MAX_HEIGHT,
    Alternatives,
    Chars,
    Lexeme,
    Node,
    Reference,
    Repeat,
    Sequence,
    height,
    is_nullable,
    nullable_rules,
    references_in,
    require_no_left_recursion,
    rule_heights,
)
from quire.grammar.gbnf.parser import Parser

_MAX_ROUNDS = 50


def lark_of(grammar: str) -> str:
    """Return a GBNF grammar in llguidance's Lark notation.

    Raises:
        ValueError: it is malformed, or uses what is not supported; with line and column.
    """
    try:
        return _Writer(Parser(grammar).rules()).lark()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Writer:
    """Writes rules as Lark.

    A part is *regular* if no rule that it refers to leads back to itself; such parts can be lexemes.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._nullable = nullable_rules(rules)
        require_no_left_recursion(rules, self._nullable)
        self._heights = rule_heights(rules)
        self._max_height = MAX_HEIGHT  # of what may be a lexeme
        self._rule_lexemes: dict[str, str] = {}  # the texts of regular rules, shallow ones first
        for name in sorted(self._heights, key=self._heights.__getitem__):
            self._rule_lexemes[name] = self._text(rules[name])
        self._split: dict[str, set[int]] = {}  # texts that are no lexemes, and which items are by themselves

    def lark(self) -> str:
        """Return the grammar; lexemes are split until none is in another's way, as characters never are."""
        masks = character_masks(self._rules)
        for _ in range(_MAX_ROUNDS):
            bodies = self._planned_rules()
            conflicts = conflicts_of(bodies, self._rules, masks)
            if conflicts is None:
                break
            if not conflicts:
                return self._written(bodies)
            for text, index in conflicts:
                self._split.setdefault(text, set()).add(index)
        self._max_height = 0
        return self._written(self._planned_rules())

    def _planned_rules(self) -> dict[str, Node]:
        """Return the rules that are not parts of lexemes, with lexemes."""
        bodies: dict[str, Node] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in bodies:
                bodies[name] = self._planned(self._rules[name])
                pending += references_in(bodies[name])
        return bodies

    def _planned(self, node: Node) -> Node:
        alone: Set[int] = set()
        if height(node, self._heights) <= self._max_height:
            text = self._text(node)
            if isinstance(node, Chars) or text not in self._split:
                return Lexeme(text, node, is_nullable(node, self._nullable)) if text else EMPTY
            alone = self._split[text]
        match node:
            case Sequence(items):
                return Sequence(tuple(self._planned(item) for item in self._with_runs(items, alone)))
            case Alternatives(items):
                return Alternatives(tuple(self._planned(item) for item in items))
            case Repeat(item, least, most):
                return Repeat(self._planned(item), least, most)
        return node

    def _with_runs(self, items: tuple[Node, ...], alone: Set[int]) -> Iterator[Node]:
        """Yield the items of a sequence; adjacent regular ones are joined, unless they are all or kept
        apart."""
        runs: list[list[Node]] = [[]]
        for index, item in enumerate(items):
            if index not in alone and height(item, self._heights) < self._max_height:
                runs[-1].append(item)
            else:
                runs += [[item], []]
        for run in runs:
            yield from [Sequence(tuple(run))] if 1 < len(run) < len(items) else run

    def _written(self, bodies: Mapping[str, Node]) -> str:
        lexemes: dict[str, str] = {}
        lines = [f"start: r{self._numbers['root']}"]
        for name, body in bodies.items():
            lines.append(f"r{self._numbers[name]}: {self._rule_text(body, lexemes)}")
        lines += [f"{name}: {text}" for text, name in lexemes.items()]
        for name, text in self._rule_lexemes.items():
            if text:
                lines.append(f"R{self._numbers[name]}: {text}")
        return "\n".join(lines) + "\n"

    def _rule_text(self, node: Node, lexemes: dict[str, str]) -> str:
        """Return a planned part of a rule as Lark, having named its lexemes."""
        match node:
            case Lexeme(text, _, can_be_empty):
                whole = f"({text}) & /(?s:.+)/" if can_be_empty else text
                name = lexemes.setdefault(whole, f"T{len(lexemes)}")
                return f"{name}?" if can_be_empty else name
            case Sequence(items):
                return " ".join(self._rule_text(item, lexemes) for item in items) or '""'
            case Alternatives(items):
                return f"({' | '.join(self._rule_text(item, lexemes) for item in items)})"
            case Repeat(item, least, most):
                return f"({self._rule_text(item, lexemes)}){_repetitions(least, most)}"
            case Reference(name):
                return f"r{self._numbers[name]}"
        raise AssertionError(node)

    def _text(self, node: Node) -> str:
        """Return a regular part as the definition of a lexeme in Lark; "": it matches nothing else."""
        match node:
            case Chars(ranges):
                return f"/{_class(ranges)}/"
            case Sequence(items):
                texts = [self._text(item) for item in items]
                return " ".join(text for text in texts if text).replace("/ /", "")
            case Alternatives(items):
                texts = [self._text(item) for item in items]
                return "(" + " | ".join(text or '""' for text in texts) + ")" if any(texts) else ""
            case Repeat(item, least, most):
                text = self._text(item)
                return f"({text}){_repetitions(least, most)}" if text and most != 0 else ""
            case Reference(name):
                return f"R{self._numbers[name]}" if self._rule_lexemes[name] else ""
        raise AssertionError(node)


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a class as a regular expression has it."""
    text = "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges)
    return text if len(text) == 1 else f"[{text}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _repetitions(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"

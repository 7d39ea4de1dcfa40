"""The rules of a GBNF grammar as trees, and their analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

MAX_HEIGHT = 200  # of a lexeme's expression, with the rules that it refers to
SURROGATES = (0xD800, 0xDFFF)
MAX_CODE_POINT = 0x10FFFF


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Chars:
    """One character out of disjoint ranges of code points in order."""

    ranges: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Sequence:
    """Parts one after another."""

    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Alternatives:
    """One of several parts."""

    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """A part `least` to `most` times; None: any number of times."""

    item: Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Reference:
    """Another rule."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Lexeme:
    """A part of a rule that llguidance's lexer matches as a whole, where it is not empty."""

    text: str  # in Lark; equal texts are one lexeme
    node: Node
    can_be_empty: bool


Node = Chars | Sequence | Alternatives | Repeat | Reference | Lexeme
EMPTY = Sequence(())


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(items) | Alternatives(items):
            return items
        case Repeat(item):
            return (item,)
    return ()


def all_parts(node: Node) -> Iterator[Node]:
    """Yield a part and all that it consists of, other rules left out."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += _children(node)


def references_in(node: Node) -> list[str]:
    """Return the names of the rules that a part refers to."""
    return [part.name for part in all_parts(node) if isinstance(part, Reference)]


def lexemes_in(node: Node) -> list[Lexeme]:
    """Return the lexemes of a planned part."""
    return [part for part in all_parts(node) if isinstance(part, Lexeme)]


def is_nullable(node: Node, rules: Set[str]) -> bool:
    """Whether a part may be empty, where these rules may be."""
    match node:
        case Sequence(items):
            return all(is_nullable(item, rules) for item in items)
        case Alternatives(items):
            return any(is_nullable(item, rules) for item in items)
        case Repeat(item, least):
            return least == 0 or is_nullable(item, rules)
        case Reference(name):
            return name in rules
        case Lexeme():
            return node.can_be_empty
    return False


def nullable_rules(rules: Mapping[str, Node]) -> set[str]:
    """Return the rules that match the empty text."""
    nullable: set[str] = set()
    num_before = -1
    while len(nullable) > num_before:
        num_before = len(nullable)
        nullable |= {name for name, body in rules.items() if is_nullable(body, nullable)}
    return nullable


def require_no_left_recursion(rules: Mapping[str, Node], nullable: Set[str]) -> None:
    """Raise `ValueError` if a rule may begin with itself, which llama.cpp does not allow either."""
    begins_with = {name: set(_first_references(body, nullable)) for name, body in rules.items()}
    in_cycles = begins_with.keys() - _settled(begins_with)
    if not in_cycles:
        return
    seen, name = set(), next(name for name in rules if name in in_cycles)
    while name not in seen:
        seen.add(name)
        name = min(begins_with[name] & in_cycles)
    raise ValueError(
        f"the rule {name!r:.60} may begin with itself (left recursion); let it begin with something else, "
        "or write it as a repetition"
    )


def _first_references(node: Node, nullable: Set[str]) -> Iterator[str]:
    """Yield the rules with which a part may begin."""
    if isinstance(node, Reference):
        yield node.name
    for child in _children(node):
        yield from _first_references(child, nullable)
        if isinstance(node, Sequence) and not is_nullable(child, nullable):
            return


def rule_heights(rules: Mapping[str, Node]) -> dict[str, int]:
    """Return how deep the expression of each regular rule nests, with the rules that it refers to."""
    heights: dict[str, int] = {}
    for name in _settled({name: set(references_in(body)) for name, body in rules.items()}):
        heights[name] = height(rules[name], heights)
    return heights


def height(node: Node, rules: Mapping[str, int]) -> int:
    """Return how deep an expression nests; more than fits if it refers to a rule that is not among these."""
    if isinstance(node, Reference):
        return 1 + rules.get(node.name, MAX_HEIGHT)
    return 1 + max((height(child, rules) for child in _children(node)), default=-1)


def _settled(needed: Mapping[str, Set[str]]) -> list[str]:
    """Return the names after those that they need, without any in a circle or that need one in a circle."""
    num_missing = {name: len(names) for name, names in needed.items()}
    needed_by: dict[str, list[str]] = {name: [] for name in needed}
    for name, names in needed.items():
        for other in names:
            needed_by[other].append(name)
    settled = [name for name, num in num_missing.items() if not num]
    for name in settled:  # grows
        for other in needed_by[name]:
            num_missing[other] -= 1
            if not num_missing[other]:
                settled.append(other)
    return settled

"""Finds lexemes of a grammar that would swallow text meant for a later one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping

from quire.grammar.gbnf.nodes import (
    Alternatives,
    Chars,
    Lexeme,
    Node,
    Reference,
    Repeat,
    Sequence,
    all_parts,
    is_nullable,
    lexemes_in,
    nullable_rules,
)

_MAX_STATES = 20_000  # of the automaton of all lexemes
_MAX_STATE_SETS = 2_000


def conflicts_of(
    bodies: Mapping[str, Node], rules: Mapping[str, Node], masks: Mapping[Chars, int]
) -> set[tuple[str, int]] | None:
    """Return which lexemes would swallow what may come after another; None: finding out takes too long.

    All lexemes are followed at once, over every text. Where one may end, none may go on with a character
    with which the text after that one may begin; llguidance always lets it go on. With each lexeme comes the
    item of its sequence that does, 0 if it is none.
    """
    if isinstance(bodies["root"], Lexeme):
        return set()  # nothing comes after it
    lexemes = {node.text: node.node for body in bodies.values() for node in lexemes_in(body)}
    automaton = _Automaton(rules, masks)
    try:
        starts = {text: automaton.add_lexeme(text, node) for text, node in lexemes.items()}
    except OverflowError:
        return None
    firsts = {text: automaton.first(start) for text, start in starts.items()}
    follows = _follows(bodies, firsts)
    conflicts: set[tuple[str, int]] = set()
    seen: set[frozenset[int]] = set()
    pending = list(automaton.after(automaton.closure(starts.values())))
    while pending:
        states = pending.pop()
        if states in seen:
            continue
        seen.add(states)
        if len(seen) > _MAX_STATE_SETS:
            return None
        following = functools.reduce(operator.or_, (follows[text] for text in automaton.ended(states)), 0)
        conflicts |= automaton.going_on(states, following)
        pending += automaton.after(states)
    return conflicts


class _Automaton:
    """Follows many lexemes at once: a state is a place within one of them.

    Args:
        rules: to which the lexemes refer.
        masks: bit masks of the characters of each class, see `character_masks`.
    """

    def __init__(self, rules: Mapping[str, Node], masks: Mapping[Chars, int]) -> None:
        self._rules = rules
        self._masks = masks
        self._moves: list[tuple[int, int] | None] = []  # (characters, state after one of them)
        self._empty_moves: list[list[int]] = []  # states that are reached without a character
        self._owners: list[tuple[str, int]] = []  # lexemes, and which items of their sequences
        self._ends: dict[int, str] = {}

    def add_lexeme(self, text: str, node: Node) -> int:
        """Return the state in which a lexeme begins.

        Raises:
            OverflowError: there are too many states.
        """
        self._owner = (text, 0)
        after = self._state()
        self._ends[after] = text
        items = node.items if isinstance(node, Sequence) else (node,)
        for index in reversed(range(len(items))):
            self._owner = (text, index)
            after = self._add(items[index], after)
        return after

    def first(self, state: int) -> int:
        """Return the characters with which one may go on."""
        return self._all_characters(self.closure([state]))

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return these states and those that are reached from them without a character."""
        seen, pending = set(), list(states)
        while pending:
            state = pending.pop()
            if state not in seen:
                seen.add(state)
                pending += self._empty_moves[state]
        return frozenset(state for state in seen if self._moves[state] or state in self._ends)

    def ended(self, states: Iterable[int]) -> Iterator[str]:
        """Yield the lexemes that may end here."""
        for state in states:
            if state in self._ends:
                yield self._ends[state]

    def going_on(self, states: Iterable[int], characters: int) -> set[tuple[str, int]]:
        """Return the lexemes that may go on with one of these characters, and with which of their items."""
        return {
            self._owners[state] for state in states if (move := self._moves[state]) and move[0] & characters
        }

    def after(self, states: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield the states after each character, once for all characters that lead to the same."""
        parts: list[tuple[int, list[int]]] = [(self._all_characters(states), [])]
        for state in states:
            if (move := self._moves[state]) is None:
                continue
            characters, target = move
            parts = [
                part
                for mask, targets in parts
                for part in ((mask & characters, [*targets, target]), (mask & ~characters, targets))
                if part[0]
            ]
        for _, targets in parts:
            yield self.closure(targets)

    def _all_characters(self, states: Iterable[int]) -> int:
        characters = 0
        for state in states:
            if (move := self._moves[state]) is not None:
                characters |= move[0]
        return characters

    def _state(self, move: tuple[int, int] | None = None, empty_moves: Iterable[int] = ()) -> int:
        if len(self._moves) == _MAX_STATES:
            raise OverflowError
        self._moves.append(move)
        self._empty_moves.append(list(empty_moves))
        self._owners.append(self._owner)
        return len(self._moves) - 1

    def _add(self, node: Node, after: int) -> int:
        """Return the state in which a part begins that is followed by the state `after`."""
        match node:
            case Chars():
                return self._state((self._masks[node], after))
            case Sequence(items):
                for item in reversed(items):
                    after = self._add(item, after)
                return after
            case Alternatives(items):
                return self._state(None, [self._add(item, after) for item in items])
            case Reference(name):
                return self._add(self._rules[name], after)
            case Repeat(item, least, most):
                start = self._state(None, [after])
                if most is None:
                    self._empty_moves[start].append(self._add(item, start))
                for _ in range((most or least) - least):
                    start = self._state(None, [self._add(item, start), after])
                for _ in range(least):
                    start = self._add(item, start)
                return start
        raise AssertionError(node)


def _follows(bodies: Mapping[str, Node], firsts: Mapping[str, int]) -> dict[str, int]:
    """Return with which characters the text after each lexeme may begin."""
    nullable = nullable_rules(bodies)
    rule_firsts = dict.fromkeys(bodies, 0)

    def first(node: Node) -> int:
        match node:
            case Lexeme(text):
                return firsts[text]
            case Reference(name):
                return rule_firsts[name]
            case Repeat(item):
                return first(item)
            case Alternatives(items):
                return functools.reduce(operator.or_, map(first, items))
            case Sequence(items):
                return before(items, 0)
        raise AssertionError(node)

    def before(items: Iterable[Node], after: int) -> int:
        characters = 0
        for item in items:
            characters |= first(item)
            if not is_nullable(item, nullable):
                return characters
        return characters | after

    last_firsts: dict[str, int] = {}
    while last_firsts != rule_firsts:
        last_firsts = dict(rule_firsts)
        for name, body in bodies.items():
            rule_firsts[name] = first(body)

    follows = dict.fromkeys(firsts, 0)
    rule_follows = dict.fromkeys(bodies, 0)

    def spread(node: Node, after: int) -> None:
        match node:
            case Lexeme(text):
                follows[text] |= after
            case Reference(name):
                rule_follows[name] |= after
            case Repeat(item, _, most):
                spread(item, after | (first(item) if most != 1 else 0))
            case Alternatives(items):
                for item in items:
                    spread(item, after)
            case Sequence(items):
                for item in reversed(items):
                    spread(item, after)
                    after = first(item) | (after if is_nullable(item, nullable) else 0)

    last_follows: dict[str, int] = {}
    while last_follows != rule_follows:
        last_follows = dict(rule_follows)
        for name, body in bodies.items():
            spread(body, rule_follows[name])
    return follows


def character_masks(rules: Mapping[str, Node]) -> dict[Chars, int]:
    """Return each class as a bit mask; a bit is a set of characters that no class distinguishes."""
    classes = [part for body in rules.values() for part in all_parts(body) if isinstance(part, Chars)]
    bounds = sorted({bound for each in classes for low, high in each.ranges for bound in (low, high + 1)})
    bits = {bound: bit for bit, bound in enumerate(bounds)}
    return {
        each: sum((1 << bits[high + 1]) - (1 << bits[low]) for low, high in each.ranges) for each in classes
    }

"""GBNF, the notation of llama.cpp's grammars, read and written as Lark for llguidance.

GBNF speaks of characters, llguidance of lexemes, of which each is as long as it can be: `[a-z]* "b"` as two
lexemes never matches `ab`. So a part of a grammar becomes one lexeme only where that changes nothing (see
`_conflicts`); elsewhere its parts do, in the end single characters.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Set

MAX_NESTING = 64  # parentheses
MAX_REPETITIONS = 2000  # as in llama.cpp
_MAX_HEIGHT = 200  # of a lexeme's expression, with the rules that it refers to
_MAX_STATES = 20_000  # of the automaton of all lexemes
_MAX_STATE_SETS = 2_000
_MAX_ROUNDS = 50
_SURROGATES = (0xD800, 0xDFFF)
_MAX_CODE_POINT = 0x10FFFF
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FIRST_RULE = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*[^\s:\"/|#]+[ \t]*::=")
_NUMBER = re.compile(r"[0-9]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Chars:
    """One character out of disjoint ranges of code points in order."""

    ranges: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Alternatives:
    items: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Repeat:
    item: _Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Reference:
    name: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Lexeme:
    """A part of a rule that llguidance's lexer matches as a whole, where it is not empty."""

    text: str  # in Lark; equal texts are one lexeme
    node: _Node
    can_be_empty: bool


_Node = _Chars | _Sequence | _Alternatives | _Repeat | _Reference | _Lexeme
_EMPTY = _Sequence(())
_ANY = _Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _MAX_CODE_POINT)))


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in GBNF: its first rule is `name ::= ...`, as none can be in Lark."""
    return _FIRST_RULE.match(grammar) is not None


def lark_of(grammar: str) -> str:
    """Return a GBNF grammar in llguidance's Lark notation.

    Raises:
        ValueError: it is malformed, or uses what is not supported; with line and column.
    """
    try:
        return _Writer(_Parser(grammar).rules()).lark()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Parser:
    """Reads GBNF."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._references: dict[str, int] = {}  # where each name is first referred to

    def rules(self) -> dict[str, _Node]:
        """Return the body of each rule by name."""
        rules: dict[str, _Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            start = self._at
            name = self._match(_NAME, "a rule (name ::= ...)")
            self._skip(lines=False)
            if not self._take("::="):
                raise self._error(f"expected ::= after the name {name!r:.60}")
            if name in rules:
                raise self._error(f"the rule {name!r:.60} is defined twice", start)
            self._skip(lines=True)
            rules[name] = self._alternatives(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected an item, or the end of the rule")
            self._skip(lines=True)
        for name, place in self._references.items():
            if name not in rules:
                raise self._error(f"the rule {name!r:.60} is not defined", place)
        if "root" not in rules:
            raise ValueError("it has no rule 'root'")
        return rules

    def _alternatives(self, depth: int) -> _Node:
        items = [self._sequence(depth)]
        while self._take("|"):
            self._skip(lines=True)
            items.append(self._sequence(depth))
        return items[0] if len(items) == 1 else _Alternatives(tuple(items))

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        num_repeats = 0
        while (char := self._text[self._at : self._at + 1]) and char not in "|)\r\n":
            if char in "*+?{":
                if not items:
                    raise self._error(f"there is nothing before {char!r} to repeat")
                num_repeats += 1
                if num_repeats > MAX_NESTING:
                    raise self._error(f"an item has more than {MAX_NESTING} repetitions")
                items[-1] = _Repeat(items[-1], *self._repetitions())
            elif (item := self._item(char, depth)) is not None:
                items.append(item)
                num_repeats = 0
            else:
                break
            self._skip(lines=depth > 0)
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _item(self, char: str, depth: int) -> _Node | None:
        """Read a literal, a class, a reference or a group; None: there is none."""
        if char == "(":
            return self._group(depth)
        if char in "<!":
            raise self._error("tokens (<...> and !<...>) are not supported; write their text")
        if _NAME.match(char):
            start = self._at
            name = self._match(_NAME, "a name")
            self._references.setdefault(name, start)
            return _Reference(name)
        if char not in '".[':
            return None
        self._at += 1
        if char == ".":
            return _ANY
        return self._literal() if char == '"' else self._class()

    def _group(self, depth: int) -> _Node:
        if depth == MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} parentheses are open")
        start = self._at
        self._at += 1
        self._skip(lines=True)
        group = self._alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("expected ')', which closes the group at", self._at, start)
        return group

    def _literal(self) -> _Node:
        start, items = self._at - 1, []
        while not self._take('"'):
            place = self._at
            code = self._char("the text", start)
            if _SURROGATES[0] <= code <= _SURROGATES[1]:
                raise self._error(f"U+{code:04X} is half of a character", place)
            items.append(_Chars(((code, code),)))
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _class(self) -> _Node:
        start = self._at - 1
        is_negated = self._take("^")
        ranges = []
        while not self._take("]"):
            place = self._at
            low = high = self._char("the class", start)
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char("the class", start)
            if high < low:
                raise self._error("the range ends before it begins", place)
            ranges.append((low, high))
        if not ranges:
            raise self._error("the class is empty", start)
        chosen = _complement([*_complement(ranges), _SURROGATES])
        if is_negated:
            chosen = _complement([*chosen, _SURROGATES])
        if not chosen:
            raise self._error("no character is in the class", start)
        return _Chars(tuple(chosen))

    def _char(self, what: str, start: int) -> int:
        """Read a character or an escape, and return its code point."""
        place = self._at
        if self._at >= len(self._text):
            raise self._error(f"{what} does not end", start)
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return ord(char)
        escape = self._text[self._at : self._at + 1]
        self._at += 1
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        num_digits = _HEX_ESCAPES.get(escape, 0)
        digits = self._text[self._at : self._at + num_digits]
        if not num_digits:
            raise self._error(f"the escape \\{escape} is not known", place)
        if len(digits) < num_digits or not _HEX.fullmatch(digits):
            raise self._error(f"\\{escape} needs {num_digits} hexadecimal digits", place)
        self._at += num_digits
        if int(digits, 16) > _MAX_CODE_POINT:
            raise self._error(f"there is no character U+{digits}", place)
        return int(digits, 16)

    def _repetitions(self) -> tuple[int, int | None]:
        start = self._at
        self._at += 1
        if (sign := self._text[start]) != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        self._skip(lines=True)
        least = self._count()
        most: int | None = least
        if self._take(","):
            self._skip(lines=True)
            most = None if self._text[self._at : self._at + 1] == "}" else self._count()
        if not self._take("}"):
            raise self._error("expected '}' after the number of repetitions")
        if most is not None and most < least:
            raise self._error("fewer repetitions are allowed than are needed", start)
        return least, most

    def _count(self) -> int:
        start = self._at
        digits = self._match(_NUMBER, "a number of repetitions")
        if len(digits) > len(str(MAX_REPETITIONS)) or int(digits) > MAX_REPETITIONS:
            raise self._error(f"{digits:.20} repetitions are too many; at most {MAX_REPETITIONS} fit", start)
        self._skip(lines=True)
        return int(digits)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"expected {what}")
        self._at = match.end()
        return match.group()

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        if is_there:
            self._at += len(text)
        return is_there

    def _skip(self, *, lines: bool) -> None:
        """Pass over spaces and comments, and over ends of lines if `lines`."""
        while (char := self._text[self._at : self._at + 1]) and char in (" \t#\r\n" if lines else " \t#"):
            if char != "#":
                self._at += 1
                continue
            while self._text[self._at : self._at + 1] not in ("", "\r", "\n"):
                self._at += 1

    def _error(self, message: str, *places: int) -> ValueError:
        """Return the error about the first place, by default the current one."""
        shown = [self._place(place) for place in (places or (self._at,))]
        return ValueError(f"{shown[0]}: {' '.join([message, *shown[1:]])}")

    def _place(self, position: int) -> str:
        line = self._text.count("\n", 0, position) + 1
        column = position - self._text.rfind("\n", 0, position)
        return f"line {line}, column {column}"


class _Writer:
    """Writes rules as Lark.

    A part is *regular* if no rule that it refers to leads back to itself; such parts can be lexemes.
    """

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._nullable = _nullable_rules(rules)
        _require_no_left_recursion(rules, self._nullable)
        self._heights = _heights(rules)
        self._max_height = _MAX_HEIGHT  # of what may be a lexeme
        self._rule_lexemes: dict[str, str] = {}  # the texts of regular rules, shallow ones first
        for name in sorted(self._heights, key=self._heights.__getitem__):
            self._rule_lexemes[name] = self._text(rules[name])
        self._split: dict[str, set[int]] = {}  # texts that are no lexemes, and which items stand alone

    def lark(self) -> str:
        """Return the grammar; lexemes are split until none is in another's way, as characters never are."""
        masks = _masks(self._rules)
        for _ in range(_MAX_ROUNDS):
            bodies = self._planned_rules()
            conflicts = _conflicts(bodies, self._rules, masks)
            if conflicts is None:
                break
            if not conflicts:
                return self._written(bodies)
            for text, index in conflicts:
                self._split.setdefault(text, set()).add(index)
        self._max_height = 0
        return self._written(self._planned_rules())

    def _planned_rules(self) -> dict[str, _Node]:
        """Return the rules that are not parts of lexemes, with lexemes."""
        bodies: dict[str, _Node] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in bodies:
                bodies[name] = self._planned(self._rules[name])
                pending += _references(bodies[name])
        return bodies

    def _planned(self, node: _Node) -> _Node:
        alone: Set[int] = set()
        if _height(node, self._heights) <= self._max_height:
            text = self._text(node)
            if isinstance(node, _Chars) or text not in self._split:
                return _Lexeme(text, node, _is_nullable(node, self._nullable)) if text else _EMPTY
            alone = self._split[text]
        match node:
            case _Sequence(items):
                return _Sequence(tuple(self._planned(item) for item in self._with_runs(items, alone)))
            case _Alternatives(items):
                return _Alternatives(tuple(self._planned(item) for item in items))
            case _Repeat(item, least, most):
                return _Repeat(self._planned(item), least, most)
        return node

    def _with_runs(self, items: tuple[_Node, ...], alone: Set[int]) -> Iterator[_Node]:
        """Yield the items of a sequence; regular neighbours are one, unless they are all or stand alone."""
        runs: list[list[_Node]] = [[]]
        for index, item in enumerate(items):
            if index not in alone and _height(item, self._heights) < self._max_height:
                runs[-1].append(item)
            else:
                runs += [[item], []]
        for run in runs:
            yield from [_Sequence(tuple(run))] if 1 < len(run) < len(items) else run

    def _written(self, bodies: Mapping[str, _Node]) -> str:
        lexemes: dict[str, str] = {}
        lines = [f"start: r{self._numbers['root']}"]
        for name, body in bodies.items():
            lines.append(f"r{self._numbers[name]}: {self._rule_text(body, lexemes)}")
        lines += [f"{name}: {text}" for text, name in lexemes.items()]
        for name, text in self._rule_lexemes.items():
            if text:
                lines.append(f"R{self._numbers[name]}: {text}")
        return "\n".join(lines) + "\n"

    def _rule_text(self, node: _Node, lexemes: dict[str, str]) -> str:
        """Return a planned part of a rule as Lark, having named its lexemes."""
        match node:
            case _Lexeme(text, _, can_be_empty):
                whole = f"({text}) & /(?s:.+)/" if can_be_empty else text
                name = lexemes.setdefault(whole, f"T{len(lexemes)}")
                return f"{name}?" if can_be_empty else name
            case _Sequence(items):
                return " ".join(self._rule_text(item, lexemes) for item in items) or '""'
            case _Alternatives(items):
                return f"({' | '.join(self._rule_text(item, lexemes) for item in items)})"
            case _Repeat(item, least, most):
                return f"({self._rule_text(item, lexemes)}){_repetitions(least, most)}"
            case _Reference(name):
                return f"r{self._numbers[name]}"
        raise AssertionError(node)

    def _text(self, node: _Node) -> str:
        """Return a regular part as the definition of a lexeme in Lark; "": it matches nothing else."""
        match node:
            case _Chars(ranges):
                return f"/{_class(ranges)}/"
            case _Sequence(items):
                texts = [self._text(item) for item in items]
                return " ".join(text for text in texts if text).replace("/ /", "")
            case _Alternatives(items):
                texts = [self._text(item) for item in items]
                return "(" + " | ".join(text or '""' for text in texts) + ")" if any(texts) else ""
            case _Repeat(item, least, most):
                text = self._text(item)
                return f"({text}){_repetitions(least, most)}" if text and most != 0 else ""
            case _Reference(name):
                return f"R{self._numbers[name]}" if self._rule_lexemes[name] else ""
        raise AssertionError(node)


def _conflicts(
    bodies: Mapping[str, _Node], rules: Mapping[str, _Node], masks: Mapping[_Chars, int]
) -> set[tuple[str, int]] | None:
    """Return which lexemes would swallow what may come after another; None: finding out takes too long.

    All lexemes are followed at once, over every text. Where one may end, none may go on with a character
    with which the text after that one may begin; llguidance always lets it go on. With each lexeme comes the
    item of its sequence that does, 0 if it is none.
    """
    if isinstance(bodies["root"], _Lexeme):
        return set()  # nothing comes after it
    lexemes = {node.text: node.node for body in bodies.values() for node in _lexemes(body)}
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
        masks: bit masks of the characters of each class, see `_masks`.
    """

    def __init__(self, rules: Mapping[str, _Node], masks: Mapping[_Chars, int]) -> None:
        self._rules = rules
        self._masks = masks
        self._moves: list[tuple[int, int] | None] = []  # (characters, state after one of them)
        self._empty_moves: list[list[int]] = []  # states that are reached without a character
        self._owners: list[tuple[str, int]] = []  # lexemes, and which items of their sequences
        self._ends: dict[int, str] = {}

    def add_lexeme(self, text: str, node: _Node) -> int:
        """Return the state in which a lexeme begins.

        Raises:
            OverflowError: there are too many states.
        """
        self._owner = (text, 0)
        after = self._state()
        self._ends[after] = text
        items = node.items if isinstance(node, _Sequence) else (node,)
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

    def _add(self, node: _Node, after: int) -> int:
        """Return the state in which a part begins that is followed by the state `after`."""
        match node:
            case _Chars():
                return self._state((self._masks[node], after))
            case _Sequence(items):
                for item in reversed(items):
                    after = self._add(item, after)
                return after
            case _Alternatives(items):
                return self._state(None, [self._add(item, after) for item in items])
            case _Reference(name):
                return self._add(self._rules[name], after)
            case _Repeat(item, least, most):
                start = self._state(None, [after])
                if most is None:
                    self._empty_moves[start].append(self._add(item, start))
                for _ in range((most or least) - least):
                    start = self._state(None, [self._add(item, start), after])
                for _ in range(least):
                    start = self._add(item, start)
                return start
        raise AssertionError(node)


def _follows(bodies: Mapping[str, _Node], firsts: Mapping[str, int]) -> dict[str, int]:
    """Return with which characters the text after each lexeme may begin."""
    nullable = _nullable_rules(bodies)
    rule_firsts = dict.fromkeys(bodies, 0)

    def first(node: _Node) -> int:
        match node:
            case _Lexeme(text):
                return firsts[text]
            case _Reference(name):
                return rule_firsts[name]
            case _Repeat(item):
                return first(item)
            case _Alternatives(items):
                return functools.reduce(operator.or_, map(first, items))
            case _Sequence(items):
                return before(items, 0)
        raise AssertionError(node)

    def before(items: Iterable[_Node], after: int) -> int:
        characters = 0
        for item in items:
            characters |= first(item)
            if not _is_nullable(item, nullable):
                return characters
        return characters | after

    last_firsts: dict[str, int] = {}
    while last_firsts != rule_firsts:
        last_firsts = dict(rule_firsts)
        for name, body in bodies.items():
            rule_firsts[name] = first(body)

    follows = dict.fromkeys(firsts, 0)
    rule_follows = dict.fromkeys(bodies, 0)

    def spread(node: _Node, after: int) -> None:
        match node:
            case _Lexeme(text):
                follows[text] |= after
            case _Reference(name):
                rule_follows[name] |= after
            case _Repeat(item, _, most):
                spread(item, after | (first(item) if most != 1 else 0))
            case _Alternatives(items):
                for item in items:
                    spread(item, after)
            case _Sequence(items):
                for item in reversed(items):
                    spread(item, after)
                    after = first(item) | (after if _is_nullable(item, nullable) else 0)

    last_follows: dict[str, int] = {}
    while last_follows != rule_follows:
        last_follows = dict(rule_follows)
        for name, body in bodies.items():
            spread(body, rule_follows[name])
    return follows


def _children(node: _Node) -> tuple[_Node, ...]:
    match node:
        case _Sequence(items) | _Alternatives(items):
            return items
        case _Repeat(item):
            return (item,)
    return ()


def _parts(node: _Node) -> Iterator[_Node]:
    """Yield a part and all that it consists of, other rules left out."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += _children(node)


def _references(node: _Node) -> list[str]:
    return [part.name for part in _parts(node) if isinstance(part, _Reference)]


def _lexemes(node: _Node) -> list[_Lexeme]:
    return [part for part in _parts(node) if isinstance(part, _Lexeme)]


def _is_nullable(node: _Node, rules: Set[str]) -> bool:
    """Whether a part may be empty, where these rules may be."""
    match node:
        case _Sequence(items):
            return all(_is_nullable(item, rules) for item in items)
        case _Alternatives(items):
            return any(_is_nullable(item, rules) for item in items)
        case _Repeat(item, least):
            return least == 0 or _is_nullable(item, rules)
        case _Reference(name):
            return name in rules
        case _Lexeme():
            return node.can_be_empty
    return False


def _nullable_rules(rules: Mapping[str, _Node]) -> set[str]:
    """Return the rules that match the empty text."""
    nullable: set[str] = set()
    num_before = -1
    while len(nullable) > num_before:
        num_before = len(nullable)
        nullable |= {name for name, body in rules.items() if _is_nullable(body, nullable)}
    return nullable


def _require_no_left_recursion(rules: Mapping[str, _Node], nullable: Set[str]) -> None:
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


def _first_references(node: _Node, nullable: Set[str]) -> Iterator[str]:
    """Yield the rules with which a part may begin."""
    if isinstance(node, _Reference):
        yield node.name
    for child in _children(node):
        yield from _first_references(child, nullable)
        if isinstance(node, _Sequence) and not _is_nullable(child, nullable):
            return


def _heights(rules: Mapping[str, _Node]) -> dict[str, int]:
    """Return how deep the expression of each regular rule nests, with the rules that it refers to."""
    heights: dict[str, int] = {}
    for name in _settled({name: set(_references(body)) for name, body in rules.items()}):
        heights[name] = _height(rules[name], heights)
    return heights


def _height(node: _Node, rules: Mapping[str, int]) -> int:
    """Return how deep an expression nests; more than fits if it refers to a rule that is not among these."""
    if isinstance(node, _Reference):
        return 1 + rules.get(node.name, _MAX_HEIGHT)
    return 1 + max((_height(child, rules) for child in _children(node)), default=-1)


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


def _masks(rules: Mapping[str, _Node]) -> dict[_Chars, int]:
    """Return each class as a bit mask; a bit stands for characters that no class tells apart."""
    classes = [part for body in rules.values() for part in _parts(body) if isinstance(part, _Chars)]
    bounds = sorted({bound for each in classes for low, high in each.ranges for bound in (low, high + 1)})
    bits = {bound: bit for bit, bound in enumerate(bounds)}
    return {
        each: sum((1 << bits[high + 1]) - (1 << bits[low]) for low, high in each.ranges) for each in classes
    }


def _complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of code points that are in none of these."""
    complement, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            complement.append((start, low - 1))
        start = max(start, high + 1)
    if start <= _MAX_CODE_POINT:
        complement.append((start, _MAX_CODE_POINT))
    return complement


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a class as a regular expression has it."""
    text = "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges)
    return text if len(text) == 1 else f"[{text}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _repetitions(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"

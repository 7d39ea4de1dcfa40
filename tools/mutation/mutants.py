"""Finding all mutants, and choosing some of them."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

SOURCES = Path("src/quire")
ROOMS = {
    "scheduling": ("scheduling", "grammar", "recording"),
    "kv": ("kv",),
    "execution": ("execution",),
    "kernels": ("kernels",),
    "engine": ("engine", "front"),
}
# The node types that each kind of operator changes.
NODE_TYPES = {
    "ReplaceBinaryOperator": {"operator"},
    "ReplaceComparisonOperator": {"comparison"},
    "ReplaceUnaryOperator": {"factor", "not_test"},
    "ReplaceTrueWithFalse": {"keyword"},
    "ReplaceFalseWithTrue": {"keyword"},
    "ReplaceAndWithOr": {"keyword"},
    "ReplaceOrWithAnd": {"keyword"},
    "ReplaceBreakWithContinue": {"keyword"},
    "ReplaceContinueWithBreak": {"keyword"},
    "NumberReplacer": {"number"},
    "AddNot": {"if_stmt", "while_stmt", "assert_stmt", "test"},
    "ExceptionReplacer": {"except_clause"},
    "RemoveDecorator": {"decorator"},
    "ZeroIterationForLoop": {"for_stmt"},
}
BINARY_EXPRESSIONS = {"arith_expr", "term", "power", "shift_expr", "and_expr", "xor_expr", "expr"}
# Operands of `is` are equal only if identical: None, classes, members of enumerations.
EQUIVALENT = ("_Is_Eq", "_Eq_Is", "_IsNot_NotEq", "_NotEq_IsNot")
# Without these, behaviour is the same, only slower or with fewer checks.
HARMLESS_DECORATORS = ("abstract", "override", "final", "overload", "cache", "lru_cache", "runtime_checkable")


@dataclass(frozen=True)
class Mutant:
    """One change at one place. Lines count from 1, columns from 0; `lines` are those of its statement."""

    room: str
    file: str
    line: int
    column: int
    lines: tuple[int, int]
    function: str
    text: str
    operator: str
    occurrence: int

    @property
    def kind(self) -> str:
        """The name of the operator, without its operands."""
        return self.operator.removeprefix("core/").split("_")[0]

    @property
    def key(self) -> tuple[str | int, ...]:
        """Identity of the mutant when its line moves within the package; methods keep their names."""
        return (self.room, self.function.rsplit(".")[-1], self.text, self.column, self.operator)

    def source(self) -> str:
        """Return the text of the mutated file."""
        mutated = mutate_code(Path(self.file).read_text(), get_operator(self.operator)(), self.occurrence)
        return str(mutated)

    def is_a_change(self) -> bool:
        """Whether the mutated file compiles, and to other bytecode than the original."""
        try:
            return ast.dump(ast.parse(self.source())) != ast.dump(ast.parse(Path(self.file).read_text()))
        except (SyntaxError, AttributeError):  # cosmic-ray cannot replace `except module.Name`
            return False


def draw(num_per_room: int, seed: int, like: list[Mutant]) -> list[Mutant]:
    """Choose mutants for each package: those of `like` whose lines still exist, the others at random.

    There is at most one mutant per place. A lost mutant of `like` is replaced by one of its kind, if any.
    """
    drawn = []
    for room in ROOMS:
        rng = random.Random(f"{seed} {room}")
        found = _by_place(room)
        chosen = _found_again([mutant for mutant in like if mutant.room == room], found)
        lost = [m.kind for m in like if m.room == room]
        for mutant in chosen:
            lost.remove(mutant.kind)
        taken = {(mutant.file, mutant.line, mutant.column, mutant.kind) for mutant in chosen}
        others = sorted(found.keys() - taken)
        rng.shuffle(others)
        for kind in lost:  # kinds of the lost mutants first, in their order
            index = next((i for i, place in enumerate(others) if place[-1] == kind), 0)
            others.insert(0, others.pop(index))
        while len(chosen) < num_per_room and others:
            alternatives = found[others.pop(0)]
            rng.shuffle(alternatives)
            chosen += [mutant for mutant in alternatives if mutant.is_a_change()][:1]
        drawn += chosen[:num_per_room]
    return drawn


def _found_again(like: list[Mutant], found: dict[tuple[Any, ...], list[Mutant]]) -> list[Mutant]:
    by_key = defaultdict(list)
    for alternatives in found.values():
        for mutant in alternatives:
            by_key[mutant.key].append(mutant)
    again = []
    for mutant in like:
        if same := by_key[mutant.key]:
            same.sort(key=lambda other: (other.file != mutant.file, abs(other.line - mutant.line)))
            again.append(same.pop(0))
    return again


def _by_place(room: str) -> dict[tuple[Any, ...], list[Mutant]]:
    places = defaultdict(list)
    for folder in ROOMS[room]:
        for path in sorted((SOURCES / folder).rglob("*.py")):
            for mutant in _mutants(room, path):
                places[mutant.file, mutant.line, mutant.column, mutant.kind].append(mutant)
    return places


@cache
def _operators(node_type: str) -> list[tuple[str, Any]]:
    kinds = {kind for kind, types in NODE_TYPES.items() if node_type in types}
    names = [name for name in operator_names() if name.removeprefix("core/").split("_")[0] in kinds]
    return [(name, get_operator(name)()) for name in names]


def _mutants(room: str, path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    rows = text.splitlines()
    tree = get_ast(text)
    occurrences: dict[str, int] = defaultdict(int)
    for node in ast_nodes(tree):
        for name, operator in _operators(node.type):
            for (line, column), _ in operator.mutation_positions(node):
                occurrence = occurrences[name]
                occurrences[name] += 1
                leaf = tree.get_leaf_for_position((line, column))
                if name.endswith(EQUIVALENT) or not _changes_behaviour(node, leaf, name):
                    continue
                row = rows[line - 1]
                indentation = len(row) - len(row.lstrip())
                yield Mutant(
                    room=room,
                    file=str(path),
                    line=line,
                    column=column - indentation,
                    lines=_statement_lines(leaf),
                    function=".".join(reversed([p.name.value for p in _ancestors(leaf) if _is_scope(p)])),
                    text=row.strip(),
                    operator=name,
                    occurrence=occurrence,
                )


def _ancestors(node: Any) -> Iterator[Any]:
    while node := node.parent:
        yield node


def _is_scope(node: Any) -> bool:
    return node.type in ("funcdef", "classdef")


def _changes_behaviour(node: Any, leaf: Any, operator: str) -> bool:
    """Whether the place is not an annotation, type alias, declaration, message text or log line."""
    if node.type == "operator" and node.parent.type not in BINARY_EXPRESSIONS:
        return False
    chain = [leaf, *_ancestors(leaf)]
    types = {part.type for part in chain}
    if node.type == "decorator":
        return not node.children[1].get_code().strip().startswith(HARMLESS_DECORATORS)
    if types & {"decorator", "fstring"}:
        return False
    if "BitOr" in operator and not types & {"funcdef", "lambdef"}:
        return False
    if any(
        child.get_previous_sibling() in (":", "->")
        and parent.type in ("annassign", "tfpdef", "funcdef")
        and child.type != "suite"
        for child, parent in pairwise(chain)
    ):
        return False
    statement = next((p for p in chain if p.type == "simple_stmt"), None) or node
    return not statement.get_code().strip().startswith(("logger.", "log.", "if TYPE_CHECKING", "if __name__"))


def _statement_lines(leaf: Any) -> tuple[int, int]:
    """Return the first and last line of the simple statement, or of the part of a header, around a leaf."""
    part = leaf
    for parent in _ancestors(leaf):
        if (
            parent.type == "simple_stmt"
            or (parent.type.endswith("_stmt") and _has_suite(parent))
            or _is_scope(parent)
        ):
            break
        part = parent
    return part.start_pos[0], part.end_pos[0]


def _has_suite(node: Any) -> bool:
    return any(child.type in ("suite", "simple_stmt") for child in node.children)

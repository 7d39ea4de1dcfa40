"""The JSON-Schema-Test-Suite's draft 2020-12: what is compiled allows what is valid and nothing else.

The suite is that in the source distribution of `jsonschema` 4.26.0, without the optional tests of formats.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from byte_grammars import accepts, compiled
from quire.errors import InvalidRequestError

SUITE = json.loads((Path(__file__).parent / "json_schema_test_suite" / "draft2020-12.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "json-schema.md"
REASONS = [
    (r"what cannot be enforced: (.*?); leave", None),
    (r"the keyword '([^']+)'", None),
    (r"alternatives of a oneOf", "oneOf"),
    (r"patternProperty regexes .* not disjoint", "patternProperties"),
    (r"leads to nothing in the schema", "$ref"),
    (r"'(multipleOf)' has too many digits", None),
    (r"Unsatisfiable schema", "(no value is valid)"),
]
NOTES = {
    "oneOf": "whose alternatives may overlap",
    "patternProperties": "of which several may match one name",
    "$ref": "to other documents",
    "$schema": "of other dialects",
    "multipleOf": "with more digits than 32 bits hold",
}


def spellings(value):
    """Yield a value as JSON, with keys in every order, and whole numbers with and without a fraction."""
    if isinstance(value, dict):
        for order in itertools.islice(itertools.permutations(value), 120):
            ways = (list(itertools.islice(spellings(value[key]), 8)) for key in order)
            for parts in itertools.islice(itertools.product(*ways), 16):
                keys = (json.dumps(key, ensure_ascii=False) for key in order)
                yield "{" + ", ".join(f"{key}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    elif isinstance(value, list):
        ways = (list(itertools.islice(spellings(one), 8)) for one in value)
        for parts in itertools.islice(itertools.product(*ways), 32):
            yield f"[{', '.join(parts)}]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


def is_allowed(grammar, value) -> bool:
    return any(accepts(grammar, text) for text in spellings(value))


def keywords(error: str) -> list[str]:
    """The keywords for which a schema was refused."""
    for pattern, keyword in REASONS:
        if (found := re.search(pattern, error)) is not None:
            return [keyword] if keyword else re.findall(r"[$\w]+", found[1])
    raise AssertionError(error)


@pytest.fixture(scope="module")
def outcome():
    counts, refused, wrong = Counter(), Counter(), []
    for file, cases in SUITE.items():
        for case in cases:
            counts["schemas"] += 1
            if isinstance(case["schema"], bool):
                refused["(a schema that is no object)"] += 1
                continue
            try:
                grammar = compiled(json=json.dumps(case["schema"]))
            except InvalidRequestError as error:
                refused.update(keywords(str(error)))
                continue
            counts["compiled"] += 1
            for description, value, is_valid in case["tests"]:
                counts["values"] += 1
                if is_allowed(grammar, value) != is_valid:
                    wrong.append((file, case["description"], description, is_valid))
    return counts, refused, wrong


def test_no_valid_value_is_refused_and_no_invalid_one_is_allowed(outcome):
    _, _, wrong = outcome
    enforced_formats = [one for one in wrong if one[0] == "format" and "only an annotation" in one[2]]
    assert [one for one in wrong if one not in enforced_formats] == []
    assert len(enforced_formats) == 10


def test_the_table_in_the_documentation(outcome):
    counts, refused, _ = outcome
    rows = [f"| `{name}` {NOTES.get(name, '')} ".replace("`(", "").replace(")`", "") + f"| {number} |"
            for name, number in sorted(refused.items(), key=lambda pair: (-pair[1], pair[0]))]  # fmt: skip
    table = "\n".join(["| refused for | schemas |", "|---|---:|", *(re.sub(" +", " ", row) for row in rows)])
    total = (
        f"Of its {counts['schemas']} schemas, {counts['compiled']} are enforced, and the suite's "
        f"{counts['values']} values for these"
    )
    page = PAGE.read_text()
    assert table in page, f"\n{total}\n\n{table}\n"
    assert total in page, total

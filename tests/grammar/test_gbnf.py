"""GBNF, against a search for derivations that knows nothing of lexemes."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_grammars import accepts, compiled
from quire.errors import InvalidRequestError
from quire.grammar.gbnf import is_gbnf, lark_of
from quire.structured_outputs import MAX_GRAMMAR_BYTES

ALPHABET = "ab-&^]\né"
OTHERS = '[~\\"/. c\t\x00😀'
NAMES = ["root", "Root", "a-b", "a_b", "1st", "start", "X"]
ESCAPES = {"\n": r"\n", "\t": r"\t", "\\": r"\\", '"': r"\"", "]": r"\]", "[": r"\[", "-": r"\-"}

# A grammar is a rule for each name: (kind, ...) with parts. Only what comes after a character refers to rules
# on the left, so that no rule begins with itself.


def parts(names):
    chars = st.sampled_from(ALPHABET + OTHERS)
    leaves = st.one_of(
        st.tuples(st.just("text"), st.text(st.sampled_from(ALPHABET), max_size=3)),
        st.tuples(
            st.just("class"),
            st.booleans(),
            st.lists(st.tuples(chars, chars).map(sorted).map(tuple), min_size=1, max_size=3),
        ),
        st.just(("any",)),
        st.tuples(st.just("later"), st.sampled_from(names)),
        st.tuples(st.just("guarded"), st.sampled_from(ALPHABET), st.sampled_from(NAMES)),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.just("sequence"), st.lists(inner, max_size=3)),
            st.tuples(st.just("either"), st.lists(inner, min_size=1, max_size=3)),
            st.tuples(
                st.just("repeat"),
                inner,
                st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (2, None)]),
            ),
        ),
        max_leaves=5,
    )


def grammars():
    bodies = {name: parts(NAMES[number + 1 :]) for number, name in enumerate(NAMES[:-1])}
    last = st.tuples(st.just("text"), st.text(st.sampled_from(ALPHABET), max_size=2))
    return st.fixed_dictionaries({**bodies, NAMES[-1]: last})


class Writing:
    """Writes a grammar as GBNF in one of the ways in which it can be written."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def grammar(self, rules) -> str:
        lines = [f"{name} ::={self.gap()}{self.alternatives(part, 0)}" for name, part in rules.items()]
        self.rng.shuffle(lines)
        return "# a comment: x ::= y\n" + "\n\n".join(lines) + "\n"

    def gap(self, depth=0) -> str:
        return self.rng.choice([" ", "  ", "\t", *(["\n ", " # a ) comment\n"] if depth else [])])

    def char(self, char, in_class) -> str:
        code = ord(char)
        ways = [
            f"\\U{code:08x}",
            *([f"\\u{code:04X}"] if code < 65536 else []),
            *([f"\\x{code:02x}"] if code < 256 else []),
        ]
        plain = ESCAPES.get(char) if char in ('\\"[]-' if in_class else '\\"') else char
        if in_class and char == "^":
            plain = r"\x5E"
        return self.rng.choice([plain, plain, ESCAPES.get(char, plain), *ways]) if char != "\0" else r"\x00"

    def alternatives(self, part, depth) -> str:
        if part[0] != "either":
            return self.sequence(part, depth)
        return f"|{self.gap(1)}".join(self.sequence(one, depth) + self.gap(depth) for one in part[1])

    def sequence(self, part, depth) -> str:
        if part[0] != "sequence":
            return self.item(part, depth)
        return self.gap(depth).join(self.item(one, depth) for one in part[1]) or ("" if depth else '""')

    def item(self, part, depth) -> str:  # noqa: PLR0911
        match part:
            case ("text", text):
                return '"' + "".join(self.char(char, False) for char in text) + '"'
            case ("class", is_negated, ranges):
                inside = "".join(
                    self.char(a, True) if a == b else f"{self.char(a, True)}-{self.char(b, True)}"
                    for a, b in ranges
                )
                return f"[{'^' * is_negated}{inside}]"
            case ("any",):
                return "."
            case ("later", name):
                return name
            case ("guarded", char, name):
                return f'("{self.char(char, False)}" {name})?'
            case ("repeat", inner, (least, most)):
                ways = [f"{{{least}}}" if most == least else f"{{{least},{'' if most is None else most}}}"]
                ways += {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), "")
                return f"({self.alternatives(inner, depth + 1)}){self.rng.choice(ways)}"
        return f"({self.gap(1)}{self.alternatives(part, depth + 1)}{self.gap(1)})"


class Derivations:
    """Where each part may end in a text."""

    def __init__(self, rules, text) -> None:
        self.rules = rules
        self.text = text
        self.known = {(name, start): set() for name in rules for start in range(len(text) + 1)}
        has_grown = True
        while has_grown:
            has_grown = False
            for (name, start), ends in self.known.items():
                found = self.ends(rules[name], start)
                has_grown |= not found <= ends
                ends.update(found)

    def is_whole(self) -> bool:
        return len(self.text) in self.known["root", 0]

    def ends(self, part, start) -> set[int]:  # noqa: PLR0911
        match part:
            case ("text", text):
                return {start + len(text)} if self.text.startswith(text, start) else set()
            case ("class", is_negated, ranges):
                char = self.text[start : start + 1]
                is_in = any(a <= char <= b for a, b in ranges)
                return {start + 1} if char and is_in != is_negated else set()
            case ("any",):
                return {start + 1} if start < len(self.text) else set()
            case ("later", name):
                return self.known[name, start]
            case ("guarded", char, name):
                return {start} | (self.known[name, start + 1] if self.text.startswith(char, start) else set())
            case ("sequence", items):
                ends = {start}
                for item in items:
                    ends = {end for place in ends for end in self.ends(item, place)}
                return ends
            case ("either", items):
                return {end for item in items for end in self.ends(item, start)}
            case ("repeat", inner, (least, most)):
                ends, found = {start}, {start} if least == 0 else set()
                for count in range(1, (len(self.text) + least + 1 if most is None else most) + 1):
                    ends = {end for place in ends for end in self.ends(inner, place)}
                    if count >= least:
                        found |= ends
                return found
        raise AssertionError(part)


def sentence(rules, part, rng, fuel=40) -> str:  # noqa: PLR0911
    """A text derived at random from a part; the shorter, the less fuel is left."""
    match part:
        case ("text", text):
            return text
        case ("class", is_negated, ranges):
            chars = [c for c in ALPHABET + OTHERS if any(a <= c <= b for a, b in ranges) != is_negated]
            return rng.choice(chars or ["z"])
        case ("any",):
            return rng.choice(ALPHABET + OTHERS)
        case ("later", name):
            return sentence(rules, rules[name], rng, fuel - 1)
        case ("guarded", char, name):
            return char + sentence(rules, rules[name], rng, fuel // 2) if fuel > 0 else ""
        case ("sequence", items):
            return "".join(sentence(rules, item, rng, fuel - 1) for item in items)
        case ("either", items):
            return sentence(rules, rng.choice(items), rng, fuel - 1)
        case ("repeat", inner, (least, most)):
            count = rng.randint(least, least + 2 if most is None else most)
            return "".join(sentence(rules, inner, rng, fuel // 2) for _ in range(count))
    raise AssertionError(part)


SHORT = ["".join(chars) for length in range(4) for chars in itertools.product("ab-&é", repeat=length)]


@settings(max_examples=40)
@given(grammars(), st.randoms(use_true_random=False))
def test_a_grammar_has_the_texts_that_can_be_derived_from_it(rules, rng):
    gbnf = Writing(rng).grammar(rules)
    grammar = compiled(grammar=gbnf)
    derived = [sentence(rules, rules["root"], rng)[:8] for _ in range(6)]
    changed = [
        text[:place] + rng.choice(ALPHABET) + text[place + 1 :] for text in derived for place in (0, 3)
    ]
    for text in [*rng.sample(SHORT, 12), *derived, *changed]:
        try:
            is_complete = accepts(grammar, text)
        except InvalidRequestError as error:  # it is too ambiguous, as `("a" root?){2,}` is
            assert "Too many items" in str(error)
            return
        assert is_complete == Derivations(rules, text).is_whole(), (gbnf, text)


@pytest.mark.parametrize(
    ("grammar", "complete", "others"),
    [
        (r'root ::= "\u00e9\U0001F600\x41\t\"\[\]\\"', ['é😀A\t"[]\\'], ["é"]),
        (r"root ::= [\u00e9\U0001F600\x41-\x43]", ["é", "😀", "B"], ["D", "x"]),
        ("root ::= .", ["\n", "\r", "é", "\0", "😀"], ["", "ab"]),
        ("root ::= [a-z&&b]", ["&", "q"], ["-"]),
        ("root ::= [~~&&+--]", ["~", "&", "+", ",", "-"], ["*"]),
        (r"root ::= [a\-c]", ["a", "-", "c"], ["b"]),
        ("root ::= [-a-]", ["a", "-"], ["b"]),
        (r"root ::= [a^\]\[[:alpha:]", ["a", "^", "]", "[", ":", "l"], ["b"]),
        (r"root ::= [^^\n]", ["a", "😀"], ["^", "\n"]),
        (r"root ::= [\uD7FF-\uE000]", ["\ud7ff", "\ue000"], ["a"]),
        ("root ::= [^\\uD800-\\uDFFF]", ["a", "😀"], [""]),
        ('root::=a-b a_b 1st\na-b::="x"\na_b::="y"\r\n1st::="z"', ["xyz"], ["xxz", "yyz"]),
        ('root ::= Expr expr start\nExpr ::= "x"\nexpr ::= "y"\nstart ::= "z"', ["xyz"], ["xxz"]),
        ('root ::= "a" |\n# and\n  "b"\nx ::= "c"', ["a", "b"], ["c"]),
        ('root ::= ("a"\n# )\n "b")+', ["ab", "abab"], ["a"]),
        ('root ::= | "a"', ["", "a"], ["aa"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= ()", [""], ["a"]),
        ('root ::= "ab"{2} "c"{1,} "d"{0,2} "e"{0}', ["ababc", "ababccdd"], ["abc", "ababcddd", "ababce"]),
        ('root ::= "a"{ 1 , 2 }', ["a", "aa"], ["aaa"]),
        ('root ::= "a"?*', ["", "aaa"], ["b"]),
        ('root ::= [a-z]* "b"', ["b", "ab", "bbb"], ["a"]),
        ('root ::= "(" root ")" | x x\nx ::= [a-z]+', ["(ab)", "((abc))"], ["(a)"]),
        ('root ::= ("ab" x) "c" root? | "a" "b" x\nx ::= "c"?', ["abccab", "abc", "ab"], ["abccc"]),
        ('root ::= "(" root ")" | "in" "t"? [a-z ]', ["(int)", "(intt)", "(in )"], ["(in)"]),
        ('root ::= "\n"', ["\n"], [""]),
    ],
)
def test_what_is_written_means_what_llama_cpp_says(grammar, complete, others):
    followed = compiled(grammar=grammar)
    assert [text for text in complete if not accepts(followed, text)] == []
    assert [text for text in others if accepts(followed, text)] == []


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


def test_whole_grammars():
    grammar = compiled(grammar=JSON)
    for value in ({}, {"a": [1, -2.5, {"b": 'c\n"é'}], "": None}, {"x": [[], {}, True, False]}):
        assert accepts(grammar, json.dumps(value, ensure_ascii=False))
        assert accepts(grammar, json.dumps(value, separators=(",", ":"), indent=2).replace("\n]", "]"))
    assert not any(accepts(grammar, text) for text in ("[]", "{", '{"a" 1}', '{"a": 01}', "{}x"))
    grammar = compiled(grammar=SUMS)
    assert all(accepts(grammar, text) for text in ("x+(1*y)=3\n", "x = 2\nab_1=7 \n", "a=1\n\n\n"))
    assert not any(accepts(grammar, text) for text in ("x=", "x=1", "(x=1\n", "x+=1\n"))


def test_words_of_recursive_grammars_are_lexemes():
    """A mask costs little within a long lexeme, and much where each character is one."""
    assert r"/[\x{22}]/ (" in lark_of(JSON)
    assert r"/[a-z]/ (/[0-9\x{5F}a-z]/){0,}" in lark_of(SUMS)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a"\n  b', ["line 2, column 4", "::="]),
        ("root ::= x", ["line 1, column 10", "'x' is not defined"]),
        ('x ::= "a"', ["no rule 'root'"]),
        ('root ::= "a"\nroot ::= "b"', ["line 2, column 1", "'root' is defined twice"]),
        ('root ::= "a"\nx = "b"', ["line 2, column 3", "::="]),
        ('root ::= "a', ["line 1, column 10", "does not end"]),
        ("root ::= [a", ["line 1, column 10", "does not end"]),
        ('root ::= ("a"\n', ["line 2, column 1", "')'", "line 1, column 10"]),
        ('root ::= "a")', ["line 1, column 13"]),
        ("root ::= *", ["nothing", "repeat"]),
        ('root ::= "a"{,3}', ["number of repetitions"]),
        ('root ::= "a"{3,2}', ["fewer"]),
        ('root ::= "a"{2001}', ["2001", "2000"]),
        ('root ::= "a"{1' + "0" * 5000 + "}", ["too many"]),
        ('root ::= "a"' + "?" * 100, ["repetitions"]),
        ("root ::= <think>", ["line 1, column 10", "tokens (<...>"]),
        ("root ::= !<[7]>", ["tokens (<...>"]),
        (r'root ::= "\q"', ["column 11", r"\q"]),
        (r"root ::= [\d]", ["column 11", r"\d"]),
        (r'root ::= "\u12"', [r"\u", "4 hexadecimal"]),
        (r'root ::= "\x+1"', ["hexadecimal"]),
        (r'root ::= "\uD800"', ["U+D800"]),
        (r'root ::= "\U00110000"', ["U+00110000"]),
        ("root ::= [z-a]", ["column 11", "ends before it begins"]),
        ("root ::= []", ["empty"]),
        ("root ::= [^]", ["empty"]),
        (r"root ::= [^\x00-\U0010FFFF]", ["no character"]),
        ("root ::= 'a'", ["column 10"]),
        ("root ::= " + "(" * 8000, ["64 parentheses"]),
        ("root ::= " + "(" * 64 + "x" + (")" + "?" * 64) * 64 + '\nx ::= "a" root', ["nested too deeply"]),
        ('root ::= root "a" | "b"', ["'root'", "left recursion"]),
        ('root ::= y x\ny ::= "a"?\nx ::= (y y)* root | "b"', ["left recursion"]),
        ('<root> ::= "a"', ["line 1, column 1", "read as GBNF"]),
    ],
)
def test_what_is_refused(grammar, words):
    with pytest.raises(InvalidRequestError) as caught:
        compiled(grammar=grammar)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "is_it"),
    [
        ('root ::= "a"', True),
        ('# root: x\n\n  1st_rule-x\t::= "a"', True),
        ("root::=x", True),
        ('start: "::=" x\nx: "a"', False),
        ('start: "root ::= a"', False),
        ('// x ::= y\nstart: "a"', False),
        ("start: /x ::= y/", False),
        ('# a ::= b\nstart: "a"', False),
        ('#a ::= b\nstart: "a"', False),
        ('?start: x\nx: "a" // y ::= z', False),
        ("", False),
    ],
)
def test_which_notation_a_grammar_is_in(grammar, is_it):
    assert is_gbnf(grammar) == is_it


def longest(piece: str, start: str = "root ::= ", end: str = "") -> str:
    return start + piece * ((MAX_GRAMMAR_BYTES - len(start) - len(end)) // len(piece)) + end


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(
    "grammar",
    [
        longest('"a" '),
        longest('("a"|[^b]*)*'),
        longest("[a-z]"),
        longest("#"),
        longest("\n"),
        longest('"ab" root?'),
        longest('"'),
        longest("x ", end='\nx ::= "a" root | "b"'),
        "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(700)) + 'r700 ::= "a"\n',
        "root ::= r0\n"
        + "".join(f'r{n} ::= "a" r{n + 1} | "b" root\n' for n in range(600))
        + 'r600 ::= "a"\n',
    ],
    ids=range(10),
)
def test_reading_the_largest_grammars_ends(grammar):
    try:
        lark = lark_of(grammar)
    except ValueError:
        return
    assert len(lark) < 20 * MAX_GRAMMAR_BYTES

"""Conversion of EBNF to Lark: both accept the same texts."""

from __future__ import annotations

import re

import pytest

from gateway.text.grammars.gbnf import gbnf_to_lark, is_gbnf
from shared.errors import InvalidRequestError
from tests.fakes.grammar_text import allows, reads
from tests.fakes.growth import expect_linear

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
# as llama.cpp has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "maybe", "yesno"]),
        (ARITHMETIC, ["a=1\n", "a +b2 *7= 3 \n\nx=(1+2)\n"], ["a=1", "a=\n", "=1\n"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\n", {"b":null}]}', "{}"], ["[1]", "{a}", '{"a":1,}', '{"a":  1}']),
        ('root ::= [a-z]+ "b"', ["abb", "ab"], ["a", "b", "abc"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        (r'root ::= [^a-c\-\]]{2} . "\u00e9" ' + "'it'", ["xx\néit"], ["a-xéit", "x]xéit", "xxéit"]),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= n-m | "(" expr ")"\nn-m ::= [0-9]+', ["1+(2+33)"], ["1+"]),
        ('root ::= a\na ::= "{{a}}" b\nb ::= "\\U0001F600"?', ["{{a}}", "{{a}}😀"], ["a"]),
        ("root ::= [-+*/a\\-z]{1,}", ["-+*/az-"], ["b", ""]),
        ('root ::= "a"{2} "b"{ 1 , 2 }', ["aab", "aabb"], ["ab", "aabbb"]),
        ("root ::= 'it\\'s' | \"\"", ["it's", ""], ["its"]),
        ('root ::= "a"{0} b\nb ::= "b"{ 0 , 0 } "c"{0,1}', ["", "c"], ["a", "b", "cc"]),
        ('root ::=\n  "a" |\n  "b"\n# end', ["a", "b"], ["ab"]),
        ('Root-1 ::= "x"\nroot ::= Root-1 root_1\nroot_1 ::= "y"', ["xy"], ["x"]),
        # Repeats of what may be empty, and of alternatives that begin with the same letter.
        ('root ::= r1* "b"\nr1 ::= ("a"? "" | "ba")', ["b", "aab", "bab", "abab"], ["", "a", "ba", "bba"]),
        ('root ::= (r1 | r2)+ r2?\nr1 ::= "a" "a"\nr2 ::= ("ab")+', ["aa", "abaaab"], ["", "a", "aba", "abb"]),
    ],
)
def test_both_grammars_accept_the_same_texts(grammar, good, bad):
    assert is_gbnf(grammar)
    lark = gbnf_to_lark(grammar, "g")
    assert [text for text in good if not allows(lark, text)] == []
    assert [text for text in bad if allows(lark, text)] == []


def test_rules_become_terminals_only_if_the_language_is_unchanged():
    lark = gbnf_to_lark(JSON, "g")
    for rule in ("STRING", "NUMBER", "WS"):
        assert re.search(rf"^G\d_{rule}: ", lark, re.MULTILINE)
    assert not re.search("^G", gbnf_to_lark(ARITHMETIC, "g"), re.MULTILINE), "ws may end before a line break"
    assert re.search("^G0_ROOT: ", gbnf_to_lark('root ::= a "b"\na ::= [ab]*', "g"), re.MULTILINE)


def test_special_tokens():
    lark = gbnf_to_lark("root ::= <[300]> part <|end|>\npart ::= [a-z]+", "g")
    special = {"<|end|>": 301, "<|x|>": 300}
    assert allows(lark, "<|x|>abc<|end|>", special)
    assert not reads(lark, "abc", special)[0]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= a", "there is no rule 'a'"),
        ('foo ::= "a"', "no rule 'root'"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"**', "nothing to repeat"),
        ('root ::= "a', "cannot read"),
        ('root ::= "b"\n  ("a"', "line 2"),
        ('root ::= "a")', "expected a rule"),
        ('root ::= "a"{3,2}', "is not a range"),
        ('root ::= "a"{1000000000}', "is not a range"),
        ('root ::= "a"{' + "9" * 5000 + "}", "cannot read"),
        ("root ::= []", "is empty"),
        ('root ::= "a" (?= "b")', "nothing to repeat"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, "nested"),
        ("root ::= $", "cannot read"),
    ],
)
def test_syntax_errors_name_the_problem(grammar, words):
    """Covers CVE-2025-57809 and similar ones."""
    with pytest.raises(InvalidRequestError) as error:
        gbnf_to_lark(grammar, "g")
    assert words in error.value.message and error.value.param == "g"
    assert len(error.value.message) < 300


@pytest.mark.parametrize("grammar", ['start: "a"', "start: a\na: /::=/", '%llguidance {}\nstart: "x ::= y"'])
def test_lark_is_distinguished_from_ebnf(grammar):
    assert not is_gbnf(grammar)


def test_many_rules_take_linear_time():
    """The conversion runs on the event loop. 16,000 rules took 1.5 s when each rule visited all others."""

    def translate(number: int) -> None:
        gbnf_to_lark("\n".join(["root ::= a0", *(f'a{index} ::= "b"' for index in range(number))]), "grammar")

    expect_linear(translate, 4000, 16_000)

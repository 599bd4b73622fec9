"""The page's Markdown parser, run by Node on typical and hostile texts of models."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
PAGE = Path(__file__).parents[2] / "gateway" / "page"
PARSER = Path(__file__).parents[1] / "fakes" / "parse_markdown.mjs"
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed (Debian: apt-get install nodejs)")

EXAMPLES = {
    # Paragraphs and inline elements.
    "a\nb\n\n\nc": "<p>a<br></>b</><p>c</>",
    "*a* _b_ **c** __d__": "<p><em>a</> <em>b</> <strong>c</> <strong>d</></>",
    "***e*** ~~f~~": "<p><em><strong>e</></> <del>f</></>",
    "**a *b***, *a**b*, **a*b**": "<p><strong>a <em>b</></>, <em>a**b</>, <strong>a*b</></>",
    "2 * 3 * 4, a_b_c, ~x~, ** a**": "<p>2 * 3 * 4, a_b_c, ~x~, ** a**</>",
    "**「あ」**です (**b**) *open": "<p><strong>「あ」</>です (<strong>b</>) *open</>",
    "`a*b*` ``c`d`` ` e ` `open": "<p><code>a*b*</> <code>c`d</> <code>e</> `open</>",
    r"\*a\* \\ \`b` \n": r"<p>*a* \ `b` \n</>",
    r"\(a_1*b_2*c\) \[x\] $$a*b*c$$ \(open *x*": r"<p>\(a_1*b_2*c\) \[x\] $$a*b*c$$ (open <em>x</></>",
    "<b onclick=x>&amp;</b><br>z": "<p>&lt;b onclick=x>&amp;amp;&lt;/b><br></>z</>",
    # Links.
    "[a *b*](https://x.org/p 'title')": "<p><a https://x.org/p>a <em>b</></></>",
    "[a](<https://x.org/a b>) [](http://x.org)": "<p><a https://x.org/a%20b>a</> <a http://x.org/>http://x.org/</></>",
    "(see https://x.org/a_(b)_c*d?e=f&g#h).": (
        "<p>(see <a https://x.org/a_(b)_c*d?e=f&g#h>https://x.org/a_(b)_c*d?e=f&amp;g#h</>).</>"
    ),
    "<https://x.org/> ahttps://x.org ![i](https://x.org/i.png)": (
        "<p><a https://x.org/>https://x.org/</> ahttps://x.org <a https://x.org/i.png>i</></>"
    ),
    "[a [b](https://x.org) c](https://y.org)": (
        "<p>[a <a https://x.org/>b</> c](<a https://y.org/>https://y.org</>)</>"
    ),
    "[a](javascript:x) [b](//x.org) [c](data:,x) [d](https://u@x.org/)": (
        "<p>[a](javascript:x) [b](//x.org) [c](data:,x) [d](https://u@x.org/)</>"
    ),
    # Blocks.
    "# a #\n####### b\n#c\n## d#\n###": "<h1>a</><p>####### b<br></>#c</><h2>d#</><h3></>",
    "a\n---\n* * *\nb\n-": "<p>a</><hr><hr><p>b<br></>-</>",
    "```py x\na\n\n  # b\n```\nc": "<pre py>a\n\n  # b</><p>c</>",
    "~~~\n```\n~~~~\n```a``` b\n````\n```\n": "<pre >```</><p><code>a</> b</><pre >```\n</>",
    "- a\n  ```\n  b\n\tc\n  ```\n- d": "<ul><li><p>a</><pre >b\nc</></><li><p>d</></></>",
    "> a\n>> b\n>\n> - c\nd": "<quote><p>a</><quote><p>b</></><ul><li><p>c</></></></><p>d</>",
    "1. a\n   - b\n     c\nd\n\n2. e\n\nf": (
        "<ol 1><li><p>a</><ul><li><p>b<br></>c<br></>d</></></></><li><p>e</></></><p>f</>"
    ),
    "3) a\n  - b\n- c\n* d": "<ol 3><li><p>a</><ul><li><p>b</></></></></><ul><li><p>c</></></><ul><li><p>d</></></>",
    "In\n1986. b\n1. c\n2. d": "<p>In<br></>1986. b</><ol 1><li><p>c</></><li><p>d</></></>",
    "-\n- [ ] a\n-b": "<ul><li></><li><p>[ ] a<br></>-b</></></>",
    "| a | b |\n|:-:|--:|\n| *c* | d\\|e | f\n| g\n\nh": (
        "<table><tr><td center>a</><td right>b</></><tr><td center><em>c</></><td right>d|e</></>"
        "<tr><td center>g</></></><p>h</>"
    ),
    "t\na|b\n-|-\n- c": "<p>t</><table><tr><td >a</><td >b</></></><ul><li><p>c</></></>",
    "a|b\n-|-|-\n\n--\n|": "<p>a|b<br></>-|-|-</><p>--<br></>|</>",
    "a\r\n\r\n```\r\nb\r\n```": "<p>a</><pre >b</>",
    "": "",
}


def parse(*texts: list[str], brief: bool = False) -> list[dict[str, Any]]:
    """Return the results of one Node process for texts given in pieces."""
    assert NODE is not None
    lines = "".join(json.dumps(pieces) + "\n" for pieces in texts)
    done = subprocess.run(
        [NODE, "--stack-size=500", PARSER, (PAGE / "markdown.js").as_uri(), "brief" if brief else "whole"],
        input=lines, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Not splitlines, because JSON does not escape U+2028.
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def test_rendered_examples():
    answers = parse(*([text] for text in EXAMPLES))
    for (text, expected), answer in zip(EXAMPLES.items(), answers, strict=True):
        assert answer["whole"] == expected, text


def test_spoken_text():
    text = "# a\n*b* [c](https://x.org)\n- d\n\n| e | f |\n|-|-|\n| g | h |\n\n```\ni\n```\n> j"
    [answer] = parse([text])
    assert answer["spoken"] == "a\nb c\nd\ne, f\ng, h\ni\nj"


ALPHABET = (
    *"abh 1.|*_`~[]()<>#-+\\!:$\n\t\r\u2028\U0001f600", "\n\n", "\n- ", "\n  ", "\n    ", "\n1. ", "\n> ", "```",
    "\n```\n", "~~", "**", "](https://x.org)", "![", "https://x.org/", "\n|-|\n", "a|b\n-|-\n", "\\(", "\\)", "$$",
    "<br>", "[a](http:", "javascript:", "](//x.org)", "](https://x@y.org)",
)  # fmt: skip


def test_a_growing_text_is_rendered_as_the_whole():
    """For pieces of any size, growing texts equal whole texts, and links lead to http or https only."""
    generator = random.Random(5)
    texts = []
    for _ in range(800):
        parts = generator.choices(ALPHABET, k=generator.randrange(1, 60))
        text = "".join(parts)
        cuts = sorted(generator.choices(range(len(text) + 1), k=generator.randrange(6)))
        texts.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    texts += [list("".join(pieces)) for pieces in texts[:200]]
    for pieces, answer in zip(texts, parse(*texts), strict=True):
        assert answer["grown"] == answer["whole"], pieces
        for address in re.findall(r"<a ([^>]*)", answer["whole"]):
            assert re.match(r"https?://[^/@]+(/|$)", address), pieces


def test_only_the_last_blocks_are_parsed_again():
    for text in ("a\n\n" * 60, "# a\n" * 60, "- a\n\nb\n\n" * 30, "```\na\n```\n" * 30):
        [answer] = parse(list(text))
        assert answer["open"] <= 2


HOSTILE = (
    *"`*_[]<(\\|>\n \t#h\r\u2028", "~~", "![", "[a](", "<https://", "$$", "\\(", "\\[", "> ", "- ", "1. ", "# ",
    "```\n", "~~~a", "*a ", "a* ", "**a *", "_*", "`a``b```", "a|", "|-", "-|-\n", "a|b\n-|-\n", "- \n", "-\n ",
    "http://", "|\\", "https://x.org)", "[](https://x.org)", "[a](https://x.org (", '[a](https://x.org "', "[a](   ",
    "- -", "--", "\n>", "*" * 7 + "a", "a**b*c", "[[]", "]()", ":-", "\n\t- a", "![](((((", "=\n",
)  # fmt: skip
# The first half of a text, and the second.
TWO_HALVES = [
    ("*a ", " a*"), ("[", "](https://x.org)"), ("- ", "\n"), ("> ", "a\n"), (" ", "|"), ("-", " "), ("`", "a`"),
    ("\t", "- "), ("|", "\n|-"), ("**a", "b*"), ("- - - ", "\n  "), ("# ", " #"),
]  # fmt: skip


def test_hostile_texts_take_no_longer_than_others():
    """Quadratic growth would take hours."""
    size = 100_000
    texts = [[part * (size // len(part))] for part in HOSTILE]
    texts += [[one * (size // 2 // len(one)) + "x" + other * (size // 2 // len(other))] for one, other in TWO_HALVES]
    # Also one piece at a time, as a model writes them.
    texts += [[part] * 500 for part in ("a ", "- b\n", "a\n\n", "**c", "`", "\n")]
    assert len(parse(*texts, brief=True)) == len(texts)

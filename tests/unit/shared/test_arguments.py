"""Messages about unknown flags."""

from __future__ import annotations

import argparse

import pytest

from shared.arguments import Parser


@pytest.fixture
def parser():
    made = Parser(prog="tool", allow_abbrev=False)
    made.add_argument("target", nargs="?")
    made.add_argument("--max-num-seqs")
    made.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction)
    return made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "4"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--max_num_seqs=4"], "unknown flag --max_num_seqs; did you mean --max-num-seqs?"),
        (["--no-prefix-cache"], "unknown flag --no-prefix-cache; did you mean --no-prefix-caching?"),
        (["--prefix-cache"], "unknown flag --prefix-cache; did you mean --prefix-caching?"),
        (["--what", "a", "b"], "unknown flag --what (see tool --help)"),
        (["-x=1", "--what"], "unknown flag -x; unknown flag --what (see"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_unknown_flags_are_named_with_the_closest(parser, argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("tool: ") and message in said and said.count("\n") == 1


def test_the_value_of_an_unknown_flag_is_not_shown(parser, capsys):
    # A base64 key may begin with a dash; it is not a flag.
    values = (["--api-key=sk-secret"], ["--api-key", "sk-secret"], ["--api-key", "-secret"], ["-ksecret"])
    for argv in (*values, ["a", "--api-key", "sk-secret"]):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
    assert "secret" not in capsys.readouterr().err


def test_what_is_known_is_parsed(parser):
    parsed = parser.parse_args(["a", "--max-num-seqs", "4", "--no-prefix-caching"])
    assert (parsed.target, parsed.max_num_seqs, parsed.prefix_caching) == ("a", "4", False)

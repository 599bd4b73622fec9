"""argparse's parser, but an unknown flag is refused with the one that was probably meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Names flags that it does not know, each with the closest one that it does.

    What stands behind such a flag is never shown: it may be a key.
    """

    def error_of_flag(self, flag: str) -> str:
        """What is said of a flag that this parser does not have, given without its value."""
        # Neither of a flag and its `--no-` form is a hint at the other, which does the opposite.
        negative = flag.startswith("--no-")
        known = (text for action in self._actions for text in action.option_strings)
        return (
            f"unknown flag {flag}{suggestion(flag, [text for text in known if text.startswith('--no-') == negative])}"
        )

    # typeshed has overloads here, of namespaces that nobody passes.
    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse's; ends by `error` where something is left over."""
        parsed, rest = self.parse_known_args(args, namespace)
        unknown = list(dict.fromkeys(flag_of(text) for text in rest if text.startswith("-")))
        if unknown:
            self.error("; ".join(map(self.error_of_flag, unknown)))
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Ends the program with 2 and one line, without argparse's usage, which for many flags hides the message."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def flag_of(text: str) -> str:
    """The flag without what is its value or may be: a key that begins with one dash is cut like `-p8000`."""
    return text.partition("=")[0] if text.startswith("--") else text[:2]


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is closest, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""

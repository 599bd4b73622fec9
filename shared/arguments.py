"""argparse parser that suggests the closest flag for an unknown one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Parser that names each unknown flag together with the closest known one.

    The text after such a flag is never shown, because it may be a key.
    """

    def error_of_flag(self, flag: str) -> str:
        """Return the message for an unknown flag, given without its value."""
        # A flag and its `--no-` form do the opposite, so neither is suggested for the other.
        negative = flag.startswith("--no-")
        known = (text for action in self._actions for text in action.option_strings)
        return (
            f"unknown flag {flag}{suggestion(flag, [text for text in known if text.startswith('--no-') == negative])}"
        )

    # typeshed has overloads for namespaces, which nobody passes here.
    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse arguments as argparse does; call `error` if something is left over."""
        parsed, rest = self.parse_known_args(args, namespace)
        unknown = list(dict.fromkeys(flag_of(text) for text in rest if text.startswith("-")))
        if unknown:
            self.error("; ".join(map(self.error_of_flag, unknown)))
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def flag_of(text: str) -> str:
    """Return a flag without its value or possible value. A key that begins with one dash is cut like `-p8000`."""
    return text.partition("=")[0] if text.startswith("--") else text[:2]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""

"""The command `pelton`. It starts the other programs by exec, so that no command pays for another's imports."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from shared.arguments import flag_of, suggestion
from shared.errors import ConfigurationError

USAGE = """\
usage: pelton COMMAND [ARGUMENTS]

  serve [MODEL]   gateway and workers on this machine
  gateway         the HTTP side alone
  worker [MODEL]  one worker alone
  version         prints the version

pelton COMMAND --help lists a command's settings."""


COMMANDS = ("serve", "gateway", "worker", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 1 after an error was printed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("gateway", "worker"):
        from shared.supervisor import python_module

        line = [*python_module(command), *rest]
        os.execv(line[0], line)
    if command == "serve":
        # Until the supervisor listens there is nothing to stop in order. The imports take long enough for a Ctrl-C,
        # which is not an error with a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from shared import supervisor

        try:
            return supervisor.serve(rest, os.environ)
        except ConfigurationError as error:
            print(f"pelton serve: {error}", file=sys.stderr)
            return 1
    if command in ("version", "--version"):
        import importlib.metadata

        print(f"pelton {importlib.metadata.version('pelton')}")
        return 0
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    # If it is a flag, its value may be a key.
    shown = flag_of(command) if command.startswith("-") else command
    hint = suggestion(shown, COMMANDS)
    print(f"{USAGE}\n\npelton: unknown command {shown!r}{hint}" if command else USAGE, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Exit codes by which a child tells its supervisor why it ended."""

EXIT_CONFIGURATION = 1
"""A ConfigurationError was printed.

Unhandled Python exceptions have the same code, so it means nothing for a child that was ready before.
"""

EXIT_REFUSED = 78
"""A ConfigurationError was printed whose cause appeared only after the start (EX_CONFIG of BSD's sysexits).

Another start would fail in the same way.
"""

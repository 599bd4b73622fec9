"""What a child tells its supervisor by the way it ends."""

EXIT_CONFIGURATION = 1
"""A ConfigurationError was printed. Any fault of Python's ends with it too, so that it says nothing of a child that had
been ready."""

EXIT_REFUSED = 78
"""A ConfigurationError was printed, of something that only showed in a child that was up, and that another start would
meet again (EX_CONFIG of BSD's sysexits)."""

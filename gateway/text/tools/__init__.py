"""Formats of tool calls: prompting, grammars and incremental parsers."""

"""Load generator that replays traces against an OpenAI-compatible server from several client processes."""

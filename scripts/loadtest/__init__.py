"""Load generator: replays traces against an OpenAI-compatible server from several client processes."""

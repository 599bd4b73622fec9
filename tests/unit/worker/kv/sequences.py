"""KV managers of few pages, and sequences whose tokens are all computed."""

from __future__ import annotations

from worker.kv.manager import KVManager, SequencePages

TOKENS = list(range(100, 122))


def make_manager(**options) -> KVManager:
    return KVManager(**{"num_pages": 12, "page_size": 4, **options})


def computed(kv: KVManager, token_ids: list[int], salt: bytes = b"", num_drafted: int = 0) -> SequencePages:
    """Return a sequence whose tokens are all computed, the first `num_drafted` also by the draft model."""
    sequence = kv.open(salt)
    kv.adopt(sequence, kv.match_prefix(sequence, token_ids))
    assert kv.extend(sequence, len(token_ids))
    kv.commit(sequence, token_ids, len(token_ids))
    kv.commit_drafted(sequence, num_drafted)
    kv.check_integrity()
    return sequence

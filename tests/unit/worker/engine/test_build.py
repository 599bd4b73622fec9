"""Worker settings as seen by the scheduler and as announced to gateways."""

from __future__ import annotations

from types import SimpleNamespace

from shared.messages import Bundle
from shared.settings import WorkerSettings
from tests.fakes.fake_executor import FakeExecutor
from worker.__main__ import build_engine
from worker.stats import Counters
from worker.transport import Transport


def test_settings_reach_the_scheduler() -> None:
    settings = WorkerSettings(
        target_step_ms=12.5,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        enable_prefix_caching=False,
        speculative_method="draft_model",
        num_speculative_tokens=5,
        speculative_acceptance="rejection",
        pooling="mean",
    )
    files = SimpleNamespace(
        spec=SimpleNamespace(vocab_size=100, hidden_size=24),
        eos_token_ids=(2, 5),
        default_name="tiny",
        model_hash="m",
        bundle=Bundle(bundle_hash="b", tokenizer_json=b"{}"),
        created=1,
    )
    built = SimpleNamespace(
        executor=FakeExecutor(max_num_seqs=3, num_pages=40, page_size=4),
        num_pages=40,
        page_size=4,
        max_model_len=77,
        num_kv_groups=1,
        device="cpu",
        dtype="float32",
        check=lambda: None,
        use_idle_time=lambda: False,
        draft_max_len=64,
        max_bitwise_identical_rows=32,
    )
    counters = Counters()
    engine = build_engine(settings, files, built, Transport("ipc:///unused", "00000000", counters), counters)
    config = engine.scheduler.config
    assert (config.target_step_ms, config.max_num_seqs, config.max_num_batched_tokens) == (12.5, 3, 48)
    assert (config.max_model_len, config.eos_token_ids) == (77, (2, 5))
    assert engine.scheduler.budget.target_ms == 12.5
    assert (engine.scheduler.kv.num_pages, engine.scheduler.kv.page_size) == (40, 4)
    assert not engine.scheduler.kv.enable_prefix_caching
    speculation = engine.scheduler._speculator._config
    assert (speculation.draft_len, speculation.max_bitwise_identical_rows, speculation.max_drafts) == (64, 32, 5)
    assert (speculation.look_up, speculation.rejection) == (False, True)
    assert (engine._facts.pooling, engine._facts.hidden_size) == ("mean", 24)

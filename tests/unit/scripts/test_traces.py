"""Tests of trace formats and of the errors for invalid lines."""

from pathlib import Path

import pytest

from scripts.loadtest.traces import TraceError, read_trace

SAMPLE = Path(__file__).parents[3] / "scripts" / "traces" / "sample.jsonl"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_sample_has_forty_requests_in_a_minute_with_shared_prefixes():
    requests = read_trace(SAMPLE)
    assert len(requests) == 40
    assert [r.index for r in requests] == list(range(40))
    assert requests[0].arrival == 0
    assert requests[-1].arrival < 60
    prefixes = [r.segments[0].key for r in requests if r.segments and r.segments[0].key.startswith("prefix-")]
    assert len(prefixes) > len(set(prefixes)) > 1
    assert any(r.text for r in requests)


def test_pelton_format(tmp_path):
    path = write(
        tmp_path,
        '# a comment\n\n{"arrival": 5, "prompt": "hello", "output_length": 3}\n'
        '{"arrival": 3.5, "input_length": 10, "prefix": "p", "prefix_length": 4}\n',
    )
    first, second = read_trace(path)
    assert (first.arrival, first.max_tokens, first.num_prompt_tokens) == (0.0, None, 10)
    assert [(s.key, s.num_tokens) for s in first.segments] == [("prefix-p", 4), ("line-4", 6)]
    assert (second.arrival, second.text, second.max_tokens, second.num_prompt_tokens) == (1.5, "hello", 3, None)


def test_equal_mooncake_hashes_share_a_segment(tmp_path):
    path = write(
        tmp_path,
        '{"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 2500, "input_length": 1600, "output_length": 9, "hash_ids": [1, 2, 8]}\n',
    )
    first, second = read_trace(path)
    assert [(s.key, s.num_tokens) for s in first.segments] == [("block-1", 512), ("block-2", 512), ("block-3", 76)]
    assert [(s.key, s.num_tokens) for s in second.segments] == [
        ("block-1", 512), ("block-2", 512), ("block-8", 512), ("line-2", 64),
    ]  # fmt: skip
    assert second.arrival == 1.5


def test_azure_timestamps_with_seven_digits_or_time_zone(tmp_path):
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n",
    )
    first, second = read_trace(path)
    assert (first.num_prompt_tokens, first.max_tokens) == (374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    assert second.max_tokens == 1
    zoned = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 00:00:02+00:00,2,2\n"
    assert read_trace(write(tmp_path, zoned))[1].arrival == pytest.approx(1.5)


def test_cut_prompts_keep_prefixes(tmp_path):
    path = write(tmp_path, '{"timestamp": 0, "input_length": 900, "output_length": 70, "hash_ids": [4, 5]}')
    (request,) = read_trace(path, max_input=600, max_output=8)
    assert [(s.key, s.num_tokens) for s in request.segments] == [("block-4", 512), ("block-5", 88)]
    assert request.max_tokens == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace is empty"),
        ("hello\n", "line 1: unknown trace format"),
        ('{"time": 1}\n', "line 1: unknown trace format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ('{"arrival": 0, "prompt": "a"}\n{"arrival": ', "line 2: Input data was truncated"),
        ('{"arrival": 0, "prompt": "a"}\n[1]', "line 2: Expected `object`, got `array`"),
        (
            '{"arrival": 0, "prompt": "a"}\n{"arrival": -1, "prompt": "a"}',
            "line 2: Expected `float` >= 0.0 - at `$.arrival`",
        ),
        ('{"arrival": NaN, "prompt": "a"}', "line 1: JSON is malformed"),
        ('{"arrival": 0, "prompt": "a", "lenght": 3}', "line 1: Object contains unknown field `lenght`"),
        ('{"arrival": 0, "prompt": "a", "input_length": 3}', "exactly one of `prompt` and `input_length`"),
        ('{"arrival": 0, "input_length": 3, "prefix": "a", "prefix_length": 4}', "larger than `input_length` 3"),
        ('{"arrival": 0, "input_length": true}', "got `bool` - at `$.input_length`"),
        ('{"arrival": 0, "input_length": 99999999999}', "Expected `int` <= 10000000 - at `$.input_length`"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1, 2]}', "2 `hash_ids` are too many"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: `TIMESTAMP` must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1\n", "line 2: expected 3 columns"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,1\n",
            "line 2: Expected `int`, got `str` - at `$.ContextTokens`",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")

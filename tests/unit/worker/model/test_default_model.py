"""Default model compared with transformers in float32, which dequantizes the weights with the gguf package."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kernels.backends.select import sampling_ops
from kernels.common.cpu import bf16
from shared.settings import WorkerSettings
from tests.fakes.engine_harness import Harness, make_submit
from tests.fakes.weights import make_batch
from worker.executor.build import make_runner
from worker.executor.device import Device
from worker.executor.executor import LocalExecutor
from worker.executor.memory import KVPlan
from worker.executor.models import Models
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.loading import ModelFiles, default_model_path
from worker.parallel import ParallelContext

PAGE = 16
pytestmark = pytest.mark.timeout(300)
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "List three prime numbers.",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "What is 12 times 12?",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return LlamaForCausalLM in float32; this takes some seconds and a GB."""
    path = default_model_path()
    config = LlamaConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    # Buffers of a model made on "meta" have no values; the rope table is made again.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = Tokenizer.from_buffer(bytes(files.bundle.tokenizer_json))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def make_decoder(files: ModelFiles, dtype: torch.dtype) -> Decoder:
    return Decoder(files.spec, files.weights, dtype=dtype, device="cpu", max_model_len=512)


@pytest.fixture(scope="module")
def decoder(files: ModelFiles) -> Decoder:
    return make_decoder(files, torch.float32)


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(4, 12), pytest.param(8, 64, marks=pytest.mark.slow)])
def test_logits_and_greedy_tokens(
    files: ModelFiles, decoder: Decoder, reference: Any, prompts: list[list[int]], num_prompts: int, num_tokens: int
) -> None:
    """Compute prompts in chunks of two sizes, then decode them together; each token must be transformers' choice."""
    prompts = prompts[:num_prompts]
    width = 10
    kv = KVStorage(files.spec, width * len(prompts), PAGE, torch.float32, "cpu")
    tables = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
    parts = [decoder.forward(make_batch([(p[:7], 0, t) for p, t in zip(prompts, tables)], PAGE), kv)]
    parts.append(decoder.forward(make_batch([(p[7:], 7, t) for p, t in zip(prompts, tables)], PAGE), kv))
    ends = torch.tensor([len(p) - 7 for p in prompts]).cumsum(0) - 1
    logits = parts[1][ends]
    tokens = [list(prompt) for prompt in prompts]
    decoded = [[row] for row in logits]
    for step in range(num_tokens):
        for sequence, row in zip(tokens, logits):
            sequence.append(int(row.argmax()))
        if step + 1 < num_tokens:
            batch = make_batch([(s[-1:], len(s) - 1, t) for s, t in zip(tokens, tables)], PAGE, "last")
            logits = decoder.forward(batch, kv)
            for rows, row in zip(decoded, logits):
                rows.append(row)
    for prompt, sequence, rows in zip(prompts, tokens, decoded):
        with torch.no_grad():
            wanted = reference(torch.tensor([sequence[:-1]])).logits[0, len(prompt) - 1 :]
        assert wanted.argmax(dim=-1).tolist() == sequence[len(prompt) :]
        assert (torch.stack(rows) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_embeddings(
    files: ModelFiles, decoder: Decoder, reference: Any, prompts: list[list[int]], dtype: Literal["float32", "bfloat16"]
) -> None:
    """Compare both poolings, computed by scheduler and runner in concurrent chunks, with transformers' last states."""
    if dtype == "bfloat16":
        if not bf16.supported():
            pytest.skip("this processor does not multiply bfloat16")
        decoder = make_decoder(files, torch.bfloat16)
    settings = WorkerSettings(dtype=dtype, max_num_seqs=4, max_num_batched_tokens=32, block_size=PAGE)
    ops, plan = sampling_ops(torch.device("cpu"), 1, files.spec.vocab_size), KVPlan(32, 96)
    runner = make_runner(settings, Models(decoder, ParallelContext()), plan, ops, Device())
    harness = Harness(page_size=PAGE)
    harness.executor = LocalExecutor(runner.launch)  # type: ignore[assignment]
    for number, prompt in enumerate(prompts[:3]):
        for pooling in ("last", "mean"):
            harness.add(make_submit(f"{pooling}{number}", prompt, pooling=pooling))
    harness.drain()
    for number, prompt in enumerate(prompts[:3]):
        with torch.no_grad():
            states = reference.model(torch.tensor([prompt])).last_hidden_state[0]
        for pooling, wanted in (("last", states[-1]), ("mean", states.mean(dim=0))):
            embedding = harness.outputs[f"{pooling}{number}", 0][-1].embedding
            assert embedding is not None
            found = torch.tensor(list(memoryview(embedding).cast("f")))
            assert torch.cosine_similarity(found, wanted, dim=0) > 0.995
            if dtype == "float32":
                assert (found - wanted).abs().max() < 1e-3

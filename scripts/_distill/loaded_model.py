"""Model with a KV cache but without a worker: generates many texts at once and scores given ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.backends.select import sampling_ops
from kernels.ops.sampling.inputs import NO_CUT, SamplingInputs
from shared.settings import WorkerSettings
from worker.executor.resolve import resolve_dtype, resolve_kv_dtype
from worker.kv.storage import KVStorage
from worker.model.decoder import Decoder
from worker.model.forward_batch import ForwardBatch
from worker.model.loading.model_files import ModelFiles

_PAGE_SIZE = 16
_HEAD_ROWS = 256
"""Tokens whose logits are computed together."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling of a text: greedy at temperature 0, otherwise with the noise of `seed`."""

    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Text:
    """Prompt and output of a model.

    Attributes:
        token_ids: [tokens] int32, prompt and output.
        num_prompt: Number of prompt tokens.
        top_ids: [outputs, K] int32, the most likely tokens at each position of the output, in descending order.
        top_logprobs: [outputs, K] float16, their log-probabilities at temperature 1.
    """

    token_ids: torch.Tensor
    num_prompt: int
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def num_outputs(self) -> int:
        """Number of output tokens."""
        return len(self.token_ids) - self.num_prompt


class LoadedModel:
    """Decoder on the CPU with pages for a number of texts.

    Args:
        files: Opened model files; the weights are read and closed.
        num_texts: Maximum number of texts at the same time.
        max_length: Maximum number of tokens of a text.
        dtype: Type of the weights; None for the type that a worker would use on this processor.
    """

    def __init__(self, files: ModelFiles, *, num_texts: int, max_length: int, dtype: torch.dtype | None = None) -> None:
        settings, device = WorkerSettings(device="cpu"), torch.device("cpu")
        dtype = dtype or resolve_dtype(settings, device)
        self.spec = files.spec
        self._ends = frozenset(files.eos_token_ids)
        self._pages_each = -(-max_length // _PAGE_SIZE)
        self._decoder = Decoder(files.spec, files.weights, dtype=dtype, device=device, max_model_len=max_length)
        files.weights.close()
        kv_dtype = resolve_kv_dtype(settings, device, dtype)
        self._kv = KVStorage(files.spec, num_texts * self._pages_each, _PAGE_SIZE, kv_dtype, device)
        self._decoder.fuse_layers(self._kv)
        self._ops = sampling_ops(device, torch.get_num_threads())
        self._ops.compile()

    def generate(
        self, prompts: Sequence[Sequence[int]], draws: Sequence[Draw], *, max_tokens: int, num_top: int
    ) -> list[Text]:
        """Continue each prompt until and including an end-of-text token, or for max_tokens tokens."""
        texts = [list(prompt) for prompt in prompts]
        tops: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in texts]
        running = list(range(len(texts)))
        hidden = torch.cat([self._hidden([i], texts, 0) for i in running])
        while running:
            logits = self._decoder.logits(hidden)
            values, ids = logits.topk(num_top, dim=-1)
            values -= logits.logsumexp(dim=-1, keepdim=True)
            positions = torch.tensor([len(texts[i]) for i in running])
            new = self.choose(logits, [draws[i] for i in running], positions).tolist()
            for row, i in enumerate(running):
                tops[i].append((ids[row].int(), values[row].half()))
                texts[i].append(new[row])
            running = [
                i for i in running if texts[i][-1] not in self._ends and len(texts[i]) < len(prompts[i]) + max_tokens
            ]
            if running:
                hidden = self._hidden(running, texts, -1)
        return [
            Text(
                torch.tensor(text, dtype=torch.int32),
                len(prompt),
                torch.stack([ids for ids, _ in top]),
                torch.stack([values for _, values in top]),
            )
            for text, prompt, top in zip(texts, prompts, tops)
        ]

    def predictions(self, text: Text) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Predict the tokens of a text's output, in chunks.

        Yields:
            [n] int64 positions, and [n, vocab] float32 logits of the tokens at these positions.
        """
        ids = text.token_ids.tolist()
        first = text.num_prompt - 1
        hidden = self._hidden([0], [ids[:-1]], 0, wanted=range(first, len(ids) - 1))
        for start in range(0, len(hidden), _HEAD_ROWS):
            part = hidden[start : start + _HEAD_ROWS]
            yield torch.arange(start, start + len(part)) + text.num_prompt, self._decoder.logits(part)

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw], positions: torch.Tensor) -> torch.Tensor:
        """Sample [n] int64 tokens for these positions like the sampler of a worker."""
        temperature = torch.tensor([draw.temperature for draw in draws])
        seeds = torch.tensor([draw.seed for draw in draws])
        zeros = torch.zeros(len(draws), dtype=torch.int64)
        inputs = SamplingInputs(
            temperature=temperature,
            top_k=zeros,
            top_p=torch.ones(len(draws), dtype=torch.float64),
            log_min_p=torch.full((len(draws),), NO_CUT),
            key=torch.stack((seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF)),
            position=positions,
            choice=zeros,
            any_random=bool((temperature > 0).any()),
            any_filter=False,
        )
        return self._ops.sample(logits, inputs)

    def _hidden(
        self, chosen: Sequence[int], texts: Sequence[Sequence[int]], start: int, wanted: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Compute the tokens of texts from `start` on, which may be negative to count from the end.

        Returns:
            [n, hidden] of the tokens in `wanted`; if it is None, of the last token of each text.
        """
        lengths = [len(texts[i]) for i in chosen]
        starts = [start % length for length in lengths]
        counts = [length - begin for length, begin in zip(lengths, starts)]
        ids = [token for i, begin in zip(chosen, starts) for token in texts[i][begin:]]
        positions = torch.cat([torch.arange(begin, length) for begin, length in zip(starts, lengths)])
        row = torch.arange(len(chosen)).repeat_interleave(torch.tensor(counts))
        tables = torch.tensor(chosen)[:, None] * self._pages_each + torch.arange(self._pages_each)
        bounds = list(accumulate(counts, initial=0))
        batch = ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int32),
            positions=positions.int(),
            cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            slot_mapping=(tables[row, positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE,),
            block_tables=(tables.int(),),
            logits_indices=torch.tensor(bounds[1:]) - 1 if wanted is None else torch.tensor(list(wanted)),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(lengths),
        )
        return self._decoder.hidden_states(batch, self._kv)

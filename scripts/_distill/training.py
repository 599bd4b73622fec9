"""Training of a draft on the target's distributions. An interrupted training resumes with the same result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scripts._distill.draft import Draft
from scripts._distill.loaded_model import Text
from scripts._distill.texts import replaced
from shared.errors import ConfigurationError

_BETAS = (0.9, 0.95)
_LAST_SHARE = 0.05
"""Final share of the learning rate."""
_CLIP = 1.0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the training.

    Attributes:
        steps: Number of optimizer steps.
        batch: Texts per step.
        learning_rate: Maximum learning rate, reached after warm_up steps.
        warm_up: Steps with a linearly increasing learning rate.
        weight_decay: Weight decay of matrices.
        negatives: Number of sampled tokens in the softmax of a step, besides the likely ones.
        seed: Seed of the order of texts and of the negatives.
        save_every: Steps between checkpoints.
    """

    steps: int
    batch: int
    learning_rate: float
    warm_up: int
    seed: int
    weight_decay: float = 0.01
    negatives: int = 2048
    save_every: int = 50

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then cosine decay."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def batch_of(texts: Sequence[Text], schedule: Schedule, step: int) -> list[Text]:
    """Return the texts of a step. Each round uses all texts once, in a new random order."""
    start = step * schedule.batch
    chosen: list[int] = []
    while len(chosen) < schedule.batch:
        this_round, first = divmod(start + len(chosen), len(texts))
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(schedule.seed + this_round))
        chosen += order[first : first + schedule.batch - len(chosen)].tolist()
    return [texts[i] for i in chosen]


def candidates(
    top_ids: torch.Tensor, vocab_size: int, negatives: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the tokens of a step's softmax: those in top_ids, and a random sample of the others.

    Each sampled token is weighted by the number of tokens that it represents, so that the sum in the softmax is
    unbiased. The product with the head, which is most of a small draft, then covers a fraction of the vocabulary.

    Returns:
        [C] int64 tokens; [C] float32 logarithms of their weights; top_ids as indices into the tokens.
    """
    own, inverse = top_ids.long().unique(return_inverse=True)
    others = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, own, False).nonzero().squeeze(1)
    count = min(negatives, len(others))
    sampled = others[torch.randperm(len(others), generator=generator)[:count]]
    weights = torch.zeros(len(own) + count)
    if count:
        weights[len(own) :] = math.log(len(others) / count)
    return torch.cat((own, sampled)), weights, inverse


def divergence(logits: torch.Tensor, at: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the mean Kullback-Leibler divergence from the target's distribution to the draft's.

    Both distributions are over the K most likely tokens of the target and one class for all other tokens.

    Args:
        logits: [n, C] float32 logits of the draft.
        at: [n, K] columns of the K tokens.
        logprobs: [n, K] log-probabilities of the target.
    """
    draft = logits.log_softmax(dim=-1).gather(1, at)
    likely = logprobs.float()
    rest = (1 - likely.exp().sum(dim=-1)).clamp(min=1e-6)
    draft_rest = (1 - draft.exp().sum(dim=-1)).clamp(min=1e-6)
    rest_term = rest * (rest.log() - draft_rest.log())
    return ((likely.exp() * (likely - draft)).sum(dim=-1) + rest_term).mean()


def loss_of(draft: Draft, texts: Sequence[Text], negatives: int, generator: torch.Generator) -> torch.Tensor:
    """Return the mean divergence over all output tokens."""
    lengths = [len(text.token_ids) for text in texts]
    token_ids = torch.zeros((len(texts), max(lengths)), dtype=torch.int64)
    is_predicted = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        # Attention is causal, so the padding of shorter texts has no effect.
        token_ids[row, : lengths[row]] = text.token_ids
        is_predicted[row, text.num_prompt - 1 : lengths[row] - 1] = True
    hidden = draft.hidden(token_ids[:, :-1])[is_predicted[:, :-1]]
    top_ids = torch.cat([text.top_ids for text in texts])
    tokens, weights, at = candidates(top_ids, draft.spec.vocab_size, negatives, generator)
    logits = draft.logits(hidden, tokens) + weights
    return divergence(logits, at, torch.cat([text.top_logprobs for text in texts]))


class Training:
    """Draft, optimizer, and number of completed steps.

    Args:
        draft: Draft to train.
        schedule: Options of the training.
        checkpoint: File that is written periodically and at the end.
        digest: Digest of everything that determines the result; a checkpoint with another digest is rejected.
    """

    def __init__(self, draft: Draft, schedule: Schedule, checkpoint: Path, digest: str) -> None:
        self.step = 0
        self._draft = draft
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._digest = digest
        self._names = sorted(draft.trained)
        matrices = [draft.trained[name] for name in self._names if draft.trained[name].dim() > 1]
        vectors = [draft.trained[name] for name in self._names if draft.trained[name].dim() == 1]
        groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, fused=True)

    def run(self, texts: Sequence[Text], on_step: Callable[[int, float], None], until: int | None = None) -> None:
        """Run the remaining steps.

        Args:
            texts: Texts for training.
            on_step: Callback for each step with its number, starting at 1, and its loss.
            until: Step after which to stop without a checkpoint; None for the last one.
        """
        schedule, parameters = self._schedule, list(self._draft.trained.values())
        while self.step < (schedule.steps if until is None else until):
            for group in self._optimizer.param_groups:
                group["lr"] = schedule.rate(self.step)
            generator = torch.Generator().manual_seed((schedule.seed << 32) + self.step)
            batch = batch_of(texts, schedule, self.step)
            loss = loss_of(self._draft, batch, schedule.negatives, generator)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            self._optimizer.step()
            self.step += 1
            if self.step % schedule.save_every == 0 or self.step == schedule.steps:
                self._save()
            on_step(self.step, loss.item())

    def resume(self) -> None:
        """Load the checkpoint if it exists. Raises ConfigurationError if it belongs to another run."""
        if not self._checkpoint.exists():
            return
        with safe_open(self._checkpoint, framework="pt") as stored:
            metadata = stored.metadata()
            if metadata["digest"] != self._digest:
                raise ConfigurationError(
                    f"{self._checkpoint} belongs to a run with other texts or settings: repeat those or delete it"
                )
            with torch.no_grad():
                for name in self._names:
                    weight = self._draft.trained[name]
                    weight.copy_(stored.get_tensor(name))
                    self._optimizer.state[weight] = {
                        "step": torch.tensor(float(metadata["step"])),
                        "exp_avg": stored.get_tensor(f"mean/{name}"),
                        "exp_avg_sq": stored.get_tensor(f"square/{name}"),
                    }
        self.step = int(metadata["step"])

    def _save(self) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name in self._names:
            weight = self._draft.trained[name]
            state = self._optimizer.state[weight]
            tensors |= {name: weight.detach(), f"mean/{name}": state["exp_avg"], f"square/{name}": state["exp_avg_sq"]}
        with replaced(self._checkpoint) as temporary:
            save_file(tensors, temporary, metadata={"digest": self._digest, "step": str(self.step)})

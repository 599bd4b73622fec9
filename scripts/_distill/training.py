"""Trains a draft on the target's distributions. Stopped and started again, it goes on as if nothing had been."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scripts._distill.draft import Draft
from scripts._distill.files import replaced
from scripts._distill.loaded_model import Text
from shared.errors import ConfigurationError

_BETAS = (0.9, 0.95)
_LAST_SHARE = 0.05
"""Of the learning rate, at the end of the cosine."""
_CLIP = 1.0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """How a draft is trained.

    Attributes:
        steps: of the optimizer; batch: texts in each.
        learning_rate: at its highest, after warm_up steps.
        negatives: tokens beside those that the target finds likely which a step compares with.
        seed: of the order of texts and of the negatives.
        save_every: steps from checkpoint to checkpoint.
    """

    steps: int
    batch: int
    learning_rate: float
    warm_up: int
    weight_decay: float
    negatives: int
    seed: int
    save_every: int

    def rate(self, step: int) -> float:
        """Learning rate of a step: up in a line, then down along a cosine."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def batch_of(texts: Sequence[Text], schedule: Schedule, step: int) -> list[Text]:
    """The texts of a step: all of them in an order of its own, round after round."""
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
    """The tokens that a step's softmax is over: all that are in top_ids, and a random sample of the others, each of
    which stands for as many others as there are to one sampled. So the sum in the softmax is right on average, and
    the head's product, which is most of a small draft, is over a fraction of the vocabulary.

    Returns:
        [C] int64 tokens; [C] float32 logarithms of how many tokens each stands for; top_ids as indices of the first.
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
    """Mean Kullback-Leibler divergence from the target's distribution to the draft's, each taken as that over the K
    likeliest tokens of the target and all others as one.

    Args:
        logits: [n, C] float32, of the draft. at: [n, K] columns of those tokens.
        logprobs: [n, K] of the target.
    """
    mine = logits.log_softmax(dim=-1).gather(1, at)
    likely = logprobs.float()
    rest = (1 - likely.exp().sum(dim=-1)).clamp(min=1e-6)
    my_rest = (1 - mine.exp().sum(dim=-1)).clamp(min=1e-6)
    of_rest = rest * (rest.log() - my_rest.log())
    return ((likely.exp() * (likely - mine)).sum(dim=-1) + of_rest).mean()


def loss_of(draft: Draft, texts: Sequence[Text], negatives: int, generator: torch.Generator) -> torch.Tensor:
    """The divergence over all tokens of the outputs."""
    lengths = [len(text.token_ids) for text in texts]
    token_ids = torch.zeros((len(texts), max(lengths)), dtype=torch.int64)
    asked = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        # Attention looks back only, so what fills up the shorter ones changes nothing.
        token_ids[row, : lengths[row]] = text.token_ids
        asked[row, text.num_prompt - 1 : lengths[row] - 1] = True
    hidden = draft.hidden(token_ids[:, :-1])[asked[:, :-1]]
    top_ids = torch.cat([text.top_ids for text in texts])
    tokens, weights, at = candidates(top_ids, draft.spec.vocab_size, negatives, generator)
    logits = draft.logits(hidden, tokens) + weights
    return divergence(logits, at, torch.cat([text.top_logprobs for text in texts]))


class Training:
    """A draft, its optimizer, and how far they are.

    Args:
        checkpoint: written every some steps and at the end.
        digest: of all that decides the result; a checkpoint with another is refused.
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
        groups = [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, fused=True)

    def run(self, texts: Sequence[Text], told: Callable[[int, float], None], until: int | None = None) -> None:
        """The steps that are left.

        Args:
            told: called after each step with its number, from 1, and its loss.
            until: stops after this step, as an interruption would; None: the end.
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
            told(self.step, loss.item())

    def resume(self) -> None:
        """Goes to where the checkpoint is, if there is one.

        Raises:
            ConfigurationError: it is of another run.
        """
        if not self._checkpoint.exists():
            return
        with safe_open(self._checkpoint, framework="pt") as stored:
            metadata = stored.metadata()
            if metadata["digest"] != self._digest:
                raise ConfigurationError(
                    f"{self._checkpoint} is of a run with other texts or settings: give those again, or remove it"
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
            tensors |= {
                name: weight.detach(),
                f"mean/{name}": state["exp_avg"],
                f"square/{name}": state["exp_avg_sq"],
            }
        with replaced(self._checkpoint) as temporary:
            save_file(tensors, temporary, metadata={"digest": self._digest, "step": str(self.step)})

"""Verification of drafts in plain PyTorch, on any device, in float64. README.md has the definitions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.ops.sampling import reference as sampling
from kernels.ops.sampling.inputs import NOT_USABLE, NOTHING_LEFT, SamplingInputs
from kernels.ops.sampling.philox import ACCEPT_STREAM, REPLACE_STREAM, uniform_noise


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Drafts of S rows of logits.

    Attributes:
        token_ids: [S] int64, draft that each row decides on; negative if there is none.
        probabilities: [D, vocab] float32, distributions that drafts were drawn from; None if no draft has one.
        rows: [S] int64, row of `probabilities` of each draft; negative if the draft has no distribution. None if
            no draft
            has one.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor | None = None
    rows: torch.Tensor | None = None


class Verified(NamedTuple):
    """Result of the verification of a step.

    Attributes:
        kept: [S] bool, True for rows whose token is part of the output.
        num_accepted: [R] int32, number of accepted drafts of each request.
    """

    kept: torch.Tensor
    num_accepted: torch.Tensor


def verify(token_ids: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor) -> Verified:
    """Keep the rows of a request up to the first one that did not sample its draft. Reads values on the host.

    Args:
        token_ids: [S] int64, sampled tokens; negative for a failed row, which is kept and ends the kept rows.
        drafts: [S] int64, token proposed for the same position; -1 in the last row of a request.
        cu_rows: [R + 1] int32, start of the rows of each request; rows from the last value on belong to no
            request.
    """
    bounds = cu_rows.tolist()
    kept = torch.zeros(len(token_ids), dtype=torch.bool)
    num_accepted = torch.zeros(len(bounds) - 1, dtype=torch.int32)
    for request, (first, end) in enumerate(itertools.pairwise(bounds)):
        for row in range(first, end):
            kept[row] = True
            if token_ids[row] < 0 or token_ids[row] != drafts[row]:
                break
            num_accepted[request] += 1
    return Verified(kept.to(token_ids.device), num_accepted.to(token_ids.device))


def add_kept(output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, kept: torch.Tensor) -> None:
    """Count the tokens of kept rows in place, ignoring failed rows. Reads no values on the host.

    Args:
        output_counts: [slots, vocab] int32, contiguous.
        slots: [P] int64, slot of each row, repeated for requests with several rows.
        token_ids: [P] int64.
        kept: [P] bool.
    """
    counted = (kept & (token_ids >= 0)).int()
    places = slots * output_counts.shape[1] + token_ids.clamp(min=0)
    output_counts.view(-1).scatter_add_(0, places, counted)


def probabilities(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Return the distribution that `sample` draws from; at temperature 0, it is 1 at the likeliest token.

    Args:
        logits: [S, vocab] float32, as in `sample`.
        inputs: Sampling parameters of the rows.

    Returns:
        [S, vocab] float64; NaN if the row is not usable.
    """
    inputs = inputs.gathered()
    logits = sampling.allow(logits, inputs)
    best = logits.argmax(dim=-1, keepdim=True)
    highest = logits.gather(1, best)
    temperature = torch.where(inputs.temperature > 0, inputs.temperature, 1.0).unsqueeze(1)
    scaled = (logits - highest) / temperature
    if inputs.any_filter:
        scaled = sampling.filter_tokens(scaled, inputs)
    mass = scaled.double().exp()
    shares = mass / mass.sum(dim=-1, keepdim=True)
    greedy = torch.zeros_like(shares).scatter_(1, best, 1.0)
    shares = torch.where(inputs.temperature.unsqueeze(1) > 0, shares, greedy)
    return torch.where(highest.isfinite(), shares, float("nan"))


def reject(logits: torch.Tensor, inputs: SamplingInputs, drafts: DraftInputs) -> torch.Tensor:
    """Accept each draft or draw another token instead, so that tokens have the target's distribution.

    Args:
        logits: [S, vocab] float32, with penalties and masks applied; not changed.
        inputs: Sampling parameters of the rows.
        drafts: Drafts of the rows.

    Returns:
        [S] int64: the draft if and only if it is accepted, else another token. Rows without a draft get a token
            drawn from
        their distribution. Rows that are not usable get a negative value, as in `sample`.
    """
    inputs = inputs.gathered()
    vocab = logits.shape[1]
    target = probabilities(logits, inputs)
    ids = drafts.token_ids
    proposed = (ids >= 0) & (ids < vocab)
    at = torch.where(proposed, ids, 0).unsqueeze(1)
    draft = torch.zeros_like(target).scatter_(1, at, proposed.unsqueeze(1).double())
    if drafts.probabilities is not None and drafts.rows is not None:
        drawn_from = drafts.probabilities[drafts.rows.clamp(min=0)].double()
        chance = drawn_from.gather(1, at).squeeze(1)
        # A draft that cannot have been drawn from its distribution is treated as the only proposed token.
        usable = proposed & (drafts.rows >= 0) & chance.isfinite() & (chance > 0)
        draft = torch.where(usable.unsqueeze(1), drawn_from, draft)
    uniform = uniform_noise(inputs.key, inputs.choice, inputs.position, 1, ACCEPT_STREAM)
    accepted = proposed & (uniform * draft.gather(1, at) < target.gather(1, at)).squeeze(1)
    # Comparisons with NaN are false, so nothing is left of a token whose draft probability is NaN.
    left = torch.where(target > draft, target - draft, 0.0)
    left = torch.where(proposed.unsqueeze(1) & (torch.arange(vocab, device=ids.device) == at), 0.0, left)
    times = -uniform_noise(inputs.key, inputs.choice, inputs.position, vocab, REPLACE_STREAM).log()
    replacement = (left / times).argmax(dim=-1)
    accepted |= proposed & (left == 0).all(dim=-1)
    result = torch.where(accepted, ids, replacement)
    logits = sampling.allow(logits, inputs)
    result = torch.where(inputs.temperature > 0, result, logits.argmax(dim=-1))
    highest = logits.amax(dim=-1)
    result = torch.where(highest.isfinite(), result, NOT_USABLE)
    return torch.where(highest == float("-inf"), NOTHING_LEFT, result)

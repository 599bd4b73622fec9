"""Penalties, filters and sampling in plain PyTorch, on any device. README.md has the definitions."""

from __future__ import annotations

import torch

from kernels.ops.sampling.inputs import (
    NOT_USABLE,
    NOTHING_LEFT,
    AdjustInputs,
    AllowedInputs,
    BadWordsInputs,
    PenaltyInputs,
    SamplingInputs,
)
from kernels.ops.sampling.philox import gumbel_noise


def adjust(logits: torch.Tensor, inputs: AdjustInputs) -> None:
    """Add biases and masks to [S, vocab] float32 logits in place."""
    rows = inputs.rows.long()
    counts = inputs.position.unsqueeze(1) < inputs.until[rows]
    logits.scatter_add_(1, inputs.ids[rows].long(), torch.where(counts, inputs.values[rows], 0.0))


def allow(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Return [S, vocab] float32 logits, with minus infinity where the mask of the row's grammar has no bit."""
    if inputs.mask is None:
        return logits
    allowed = bits_of(inputs.mask, logits.shape[1])
    if inputs.mask_rows is not None:
        rows = inputs.mask_rows.long()
        allowed = allowed[rows.clamp(min=0)] | (rows < 0).unsqueeze(1)
    return torch.where(allowed, logits, float("-inf"))


def bits_of(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Convert [n, ceil(vocab / 32)] int32 words to [n, vocab] bool."""
    ids = torch.arange(vocab_size, device=words.device)
    return (words[:, ids // 32] >> (ids % 32).int()) & 1 != 0


def allow_only(logits: torch.Tensor, inputs: AllowedInputs) -> None:
    """Set the logits of all but the allowed tokens to minus infinity, in place, for some rows of [S, vocab] float32."""
    allowed = bits_of(inputs.allowed[inputs.table_rows], logits.shape[1])
    logits[inputs.rows] = torch.where(allowed, logits[inputs.rows], float("-inf"))


def forbid_words(logits: torch.Tensor, inputs: BadWordsInputs) -> None:
    """Set the logit of the last token of each forbidden word to minus infinity where the tokens before it match."""
    ids, left = inputs.words[inputs.table_rows, : inputs.width].long().unbind(-1)
    left = left - 1  # number of tokens of the word after this one; negative after the last word
    at = inputs.length.unsqueeze(1) - left
    before = inputs.token_ids[inputs.table_rows.unsqueeze(1), at.clamp(min=0, max=inputs.token_ids.shape[1] - 1)]
    differs = (left > 0) & ((at < 0) | (before != ids))
    # Mismatches are counted at the end of the word, `left` tokens later.
    end = torch.arange(ids.shape[1], device=ids.device) + left.clamp(min=0)
    count = torch.zeros_like(ids).scatter_add_(1, end, differs.long())
    banned = (left == 0) & (count == 0)
    # Several words may end with the same token. If the row has a banned token, all other entries ban that one again, so
    # that no two writes disagree.
    any_banned = banned.any(dim=1, keepdim=True)
    first_banned = ids.gather(1, banned.int().argmax(dim=1, keepdim=True))
    ids = torch.where(banned | ~any_banned, ids, first_banned)
    rows = inputs.rows.unsqueeze(1)
    logits[rows, ids] = torch.where(any_banned, float("-inf"), logits[rows, ids])


def penalize(logits: torch.Tensor, inputs: PenaltyInputs) -> None:
    """Apply repetition, presence and frequency penalties in place to some rows of [S, vocab] float32 logits."""
    counts = inputs.output_counts[inputs.slots]
    if inputs.extra is not None:
        counts.scatter_add_(1, inputs.extra.clamp(min=0), (inputs.extra >= 0).int())
    in_output = counts > 0
    rows = logits[inputs.rows]
    factor = torch.where(in_output | inputs.in_prompt[inputs.slots], inputs.repetition.unsqueeze(1), 1.0)
    rows = torch.where(rows > 0, rows / factor, rows * factor)
    rows -= inputs.frequency.unsqueeze(1) * counts
    rows -= inputs.presence.unsqueeze(1) * in_output
    logits[inputs.rows] = rows


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Sample one token per row.

    Args:
        logits: [S, vocab] float32, with penalties and masks applied; not changed.
        inputs: Sampling parameters of the rows.

    Returns:
        [S] int64; NOT_USABLE if the row has NaN or +inf after the grammar's mask, NOTHING_LEFT if it is all -inf.
    """
    inputs = inputs.gathered()
    logits = allow(logits, inputs)
    best = logits.argmax(dim=-1, keepdim=True)
    highest = logits.gather(1, best)
    ids = best
    if inputs.any_random:
        temperature = torch.where(inputs.temperature > 0, inputs.temperature, 1.0).unsqueeze(1)
        scaled = (logits - highest) / temperature
        if inputs.any_filter:
            scaled = filter_tokens(scaled, inputs)
        noisy = scaled + gumbel_noise(inputs.key, inputs.choice, inputs.position, logits.shape[1])
        ids = torch.where(inputs.temperature.unsqueeze(1) > 0, noisy.argmax(dim=-1, keepdim=True), best)
    # argmax returns NaN if there is one, so the largest logit reveals every row that is not usable.
    ids = torch.where(highest.isfinite(), ids, NOT_USABLE)
    return torch.where(highest == float("-inf"), NOTHING_LEFT, ids).squeeze(1)


def filter_tokens(scaled: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Replace what min_p, top_k and top_p drop by -inf.

    Args:
        scaled: [S, vocab] float32, (logits - largest) / temperature.
        inputs: Sampling parameters with one entry per row.
    """
    return keep_likeliest(scaled, inputs.log_min_p, inputs.top_k, inputs.top_p)


def keep_likeliest(
    scaled: torch.Tensor, log_min_p: torch.Tensor | float, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Apply min_p, top_k and top_p; the largest of each row of `scaled` is 0."""
    order = torch.sort(scaled, dim=-1, descending=True, stable=True)  # equal logits stay in order of their ids
    values = order.values
    rank = torch.arange(values.shape[1], device=values.device)
    keep = values >= (log_min_p.unsqueeze(1) if isinstance(log_min_p, torch.Tensor) else log_min_p)
    keep &= (rank < top_k.unsqueeze(1)) | (top_k == 0).unsqueeze(1)
    mass = torch.where(keep, values.double().exp(), 0.0)
    cumulative = mass.cumsum(dim=-1)
    top_p = top_p.unsqueeze(1)
    # A token stays while the mass of the tokens before it is below top_p; the first token always stays.
    keep &= (cumulative - mass < top_p * cumulative[:, -1:]) | (top_p >= 1.0)
    values = torch.where(keep, values, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order.indices, values)

"""DRY in plain torch, on any device and without a look at a value on the host. The maths is in README.md."""

from __future__ import annotations

import torch

from kernels.ops.sampling.inputs import MAX_DRY_EXPONENT, MAX_DRY_PENALTY, DryInputs
from kernels.ops.step_inputs.inputs import DRY_ALLOWED_LENGTH, DRY_BASE, DRY_LAST_N, DRY_MULTIPLIER

MAX_TOKENS = 1 << 21
"""Tokens that are looked at together: each takes about 200 bytes."""


def penalize_repetitions(logits: torch.Tensor, inputs: DryInputs) -> None:
    """Lowers the logits of tokens that would continue a repetition, of some rows of [S, vocab] float32, in place."""
    if inputs.longest < 2:
        return
    size = max(1, MAX_TOKENS // inputs.longest)
    for at in range(0, len(inputs.rows), size):
        _penalize(logits, inputs if len(inputs.rows) <= size else inputs.part(at, at + size))


def _penalize(logits: torch.Tensor, inputs: DryInputs) -> None:
    floats, integers = inputs.words.view(torch.float32), inputs.words.long()
    last_n, allowed = integers[:, DRY_LAST_N], integers[:, DRY_ALLOWED_LENGTH]
    back = torch.arange(inputs.longest, device=logits.device)
    window = torch.where(last_n < 0, inputs.length, torch.minimum(last_n, inputs.length)).unsqueeze(1)
    there = back < window
    at = (inputs.length.unsqueeze(1) - 1 - back).clamp(min=0)
    # [D, longest], the last token first.
    tokens = torch.where(there, inputs.token_ids[inputs.table_rows.unsqueeze(1), at].long(), -1)
    words = inputs.breakers[inputs.table_rows.unsqueeze(1), tokens.clamp(min=0) // 32]
    breaks = there & ((words >> (tokens.clamp(min=0) % 32).int()) & 1 != 0)
    limit = torch.where(breaks, back, inputs.longest).amin(dim=1)
    limit = torch.minimum(limit, allowed + MAX_DRY_EXPONENT).unsqueeze(1)
    lengths = torch.minimum(common_prefixes(tokens, inputs.longest_match), limit)[:, 1:]
    over = (lengths - allowed.unsqueeze(1)).double()
    multiplier, base = floats[:, DRY_MULTIPLIER, None].double(), floats[:, DRY_BASE, None].double()
    penalty = multiplier * base ** over.clamp(min=0.0)
    counts = (over >= 0) & there[:, 1:] & ~breaks[:, :-1]
    penalty = torch.where(counts, penalty.clamp(max=MAX_DRY_PENALTY), 0.0).float()
    # Of a token that has followed several matches the longest counts.
    most = torch.zeros((len(tokens), logits.shape[1]), device=logits.device)
    most.scatter_reduce_(1, tokens[:, :-1].clamp(min=0), penalty, "amax")
    logits[inputs.rows] = logits[inputs.rows] - most


def common_prefixes(tokens: torch.Tensor, longest: int) -> torch.Tensor:
    """How many tokens from k on are those from 0 on, for every k >= 1; exact up to `longest`, no less than it beyond.

    Blocks of 1, 2, 4, ... tokens are numbered so that equal ones have equal numbers; the length is then put together
    from the largest block down, which takes as many steps as it has bits.

    Args:
        tokens: [D, N] int64; -1 where a row has ended.

    Returns:
        [D, N] int64.
    """
    num_rows, size = tokens.shape
    numbers = [tokens]
    while 2 ** len(numbers) <= min(longest, size):
        half = 2 ** (len(numbers) - 1)
        first = numbers[-1]
        second = torch.full_like(first, -1)
        second[:, : size - half] = first[:, half:]
        values, order = torch.sort(first * 2**31 + (second + 1), dim=1)
        steps = torch.zeros_like(values)
        steps[:, 1:] = (values[:, 1:] != values[:, :-1]).long()
        numbers.append(torch.empty_like(values).scatter_(1, order, steps.cumsum(dim=1)))
    start = torch.arange(size, device=tokens.device).expand(num_rows, size)
    length = torch.zeros_like(tokens)
    for power in range(len(numbers) - 1, -1, -1):
        block, end = numbers[power], start + length
        same = block.gather(1, end.clamp(max=size - 1)) == block.gather(1, length.clamp(max=size - 1))
        length = length + torch.where(same & (end + 2**power <= size), 2**power, 0)
    return length

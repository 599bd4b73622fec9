"""Rarely used filters and DRY in plain PyTorch, on any device, without reading values on the host.

README.md defines the filters.
"""

from __future__ import annotations

import math

import torch

from kernels.ops.sampling.inputs import MAX_DRY_EXPONENT, MAX_DRY_PENALTY, NO_CUT, DryInputs, ExtendInputs, Feature
from kernels.ops.sampling.philox import XTC_STREAM, philox4x32
from kernels.ops.sampling.reference import bits_of, keep_likeliest
from kernels.ops.step_inputs.inputs import (
    CHOICE,
    DRY_ALLOWED_LENGTH,
    DRY_BASE,
    DRY_LAST_N,
    DRY_MULTIPLIER,
    DYNATEMP_EXPONENT,
    DYNATEMP_RANGE,
    LOG_MIN_P,
    LOG_XTC_THRESHOLD,
    MIROSTAT,
    MIROSTAT_ETA,
    MIROSTAT_MU,
    MIROSTAT_TAU,
    TEMPERATURE,
    TOP_K,
    TOP_N_SIGMA,
    TYPICAL_P,
    XTC_COIN,
)

MIROSTAT_SAMPLE = 100
"""Number of likeliest tokens from which mirostat 1 estimates the slope of the distribution."""
MIN_TEMPERATURE = 1e-5
MIN_SLOPE = 1e-6
"""Below this slope a distribution counts as flat, and mirostat 1 cuts nothing."""
MAX_LOGITS = 1 << 23
"""Number of logits that are processed together.

In float64, with their order and sums, they take half a gigabyte. The logits of a large batch would take several
gigabytes, which the sizing of the KV cache does not account for.
"""


def extend(logits: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    """Apply mask, top_n_sigma, temperature, then min_p, typical_p, top_k and top_p or mirostat, then XTC, in place.

    Kept logits become (logit - largest) / temperature and the others minus infinity, so that `sample` then uses a
    temperature of 1 and no filters. Rows that are not usable stay unchanged.

    Args:
        logits: [S, vocab] float32, with biases and penalties applied.
        inputs: Parameters of the E rows.

    Returns:
        [E] float32, log of the sum of exp over the tokens that the mask and top_n_sigma keep, before any other
            filter. The
        negative log-probability of a kept token is this value minus its new logit.
    """
    size = max(1, MAX_LOGITS // logits.shape[1])
    if len(inputs.rows) <= size:
        return _extend(logits, inputs)
    return torch.cat([_extend(logits, inputs.part(at, at + size)) for at in range(0, len(inputs.rows), size)])


def _extend(logits: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    rows = _allow(logits[inputs.rows], inputs)
    highest = rows.amax(dim=-1, keepdim=True)
    left = rows
    if inputs.features & Feature.SIGMA:
        left = within_sigmas(rows, inputs.float_column(TOP_N_SIGMA))
    temperature = inputs.float_column(TEMPERATURE)
    if inputs.features & Feature.DYNATEMP:
        temperature = dynamic_temperature(left - highest, inputs)
    scaled = (left - highest) / temperature.unsqueeze(1)
    log_mass = scaled.double().exp().sum(dim=-1).log().float()
    kept = scaled
    if inputs.features & (Feature.TOP | Feature.TYPICAL):
        kept = torch.where(kept >= inputs.float_column(LOG_MIN_P).unsqueeze(1), kept, NO_CUT)
        if inputs.features & Feature.TYPICAL:
            kept = keep_typical(kept, inputs.float_column(TYPICAL_P))
        kept = keep_likeliest(kept, NO_CUT, inputs.integer_column(TOP_K), inputs.top_p)
    if inputs.features & Feature.MIROSTAT:
        wanted = (inputs.integer_column(MIROSTAT) > 0).unsqueeze(1)
        kept = torch.where(wanted, keep_unsurprising(scaled, log_mass, inputs), kept)
    if inputs.features & Feature.XTC:
        kept = drop_likeliest(kept, inputs)
    logits[inputs.rows] = torch.where(highest.isfinite(), kept, rows)
    return log_mass


def _allow(rows: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    if inputs.mask is None or inputs.mask_rows is None:
        return rows
    allowed = bits_of(inputs.mask, rows.shape[1])[inputs.mask_rows.clamp(min=0)]
    return torch.where(allowed | (inputs.mask_rows < 0).unsqueeze(1), rows, NO_CUT)


def within_sigmas(rows: torch.Tensor, top_n_sigma: torch.Tensor) -> torch.Tensor:
    """Drop the [E, vocab] logits more than n standard deviations below the largest; n = 0 keeps all."""
    counts = rows > NO_CUT
    number = counts.sum(dim=-1, keepdim=True)
    values = torch.where(counts, rows.double(), 0.0)
    mean = values.sum(dim=-1, keepdim=True) / number
    squares = torch.where(counts, (values - mean) ** 2, 0.0)
    sigma = (squares.sum(dim=-1, keepdim=True) / number).sqrt()
    lowest = rows.amax(dim=-1, keepdim=True).double() - top_n_sigma.unsqueeze(1).double() * sigma
    return torch.where((rows >= lowest.float()) | (top_n_sigma == 0).unsqueeze(1), rows, NO_CUT)


def dynamic_temperature(shifted: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    """Return [E] temperatures, from the entropy of each row at temperature 1; `shifted` is logit - largest."""
    number = (shifted > NO_CUT).sum(dim=-1)
    weights = shifted.double().exp()
    mass = weights.sum(dim=-1)
    mean = torch.where(shifted > NO_CUT, weights * shifted.double(), 0.0).sum(dim=-1) / mass
    # log(1) = 0. The temperature does not matter for a single token.
    share = ((mass.log() - mean) / number.double().log()).nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(0.0, 1.0)
    temperature, reach = inputs.float_column(TEMPERATURE), inputs.float_column(DYNATEMP_RANGE).double()
    low = (temperature.double() - reach).clamp(min=0.0)
    high = temperature.double() + reach
    exponent = inputs.float_column(DYNATEMP_EXPONENT).double()
    chosen = (low + (high - low) * share**exponent).clamp(min=MIN_TEMPERATURE)
    return torch.where(reach > 0, chosen.float(), temperature)


def keep_typical(scaled: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep the tokens nearest to the expected surprise, and shift them so that the largest is 0 again."""
    weights = scaled.double().exp()
    mass = weights.sum(dim=-1, keepdim=True)
    mean = torch.where(scaled > NO_CUT, weights * scaled.double(), 0.0).sum(dim=-1, keepdim=True) / mass
    # The surprise is log(mass) - scaled; its expectation is log(mass) - mean.
    order = torch.sort((scaled - mean.float()).abs(), dim=-1, stable=True)
    sorted_mass = weights.gather(1, order.indices)
    cumulative = sorted_mass.cumsum(dim=-1)
    keep = cumulative - sorted_mass < typical_p.unsqueeze(1).double() * cumulative[:, -1:]
    keep[:, 0] = True
    keep = torch.empty_like(keep).scatter_(1, order.indices, keep)
    kept = torch.where(keep, scaled, NO_CUT)
    kept = kept - kept.amax(dim=-1, keepdim=True)
    return torch.where((typical_p < 1.0).unsqueeze(1), kept, scaled)


def keep_unsurprising(scaled: torch.Tensor, log_mass: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    """Apply mirostat 2, which drops tokens whose surprise is above mu, or mirostat 1, which keeps k tokens.

    At least one token is kept.
    """
    second, mu = inputs.integer_column(MIROSTAT) == 2, inputs.float_column(MIROSTAT_MU)
    cut = (log_mass.double() - mu.double() * math.log(2)).float()
    cut = torch.where(second, cut, NO_CUT).unsqueeze(1)
    top_k = torch.where(second, 0, top_k_of_mu(scaled, mu))
    best = scaled.argmax(dim=-1, keepdim=True)
    kept = torch.where(scaled >= cut, scaled, NO_CUT).scatter(1, best, scaled.gather(1, best))
    return keep_likeliest(kept, NO_CUT, top_k, torch.ones_like(inputs.top_p))


def top_k_of_mu(scaled: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Return [E] int64, the number of tokens that brings the expected surprise to mu (Basu et al.

    2021, algorithm 1).
    """
    likeliest = scaled.topk(min(MIROSTAT_SAMPLE, scaled.shape[1]), dim=-1).values.double()
    falls = likeliest[:, :-1] - likeliest[:, 1:]
    falls = torch.where(likeliest[:, 1:] > NO_CUT, falls, 0.0)
    rank = torch.arange(1, falls.shape[1] + 1, dtype=torch.float64, device=scaled.device)
    steps = torch.where(likeliest[:, 1:] > NO_CUT, ((rank + 1) / rank).log(), 0.0)
    slope = (steps * falls).sum(dim=-1) / (steps * steps).sum(dim=-1)
    number = (scaled > NO_CUT).sum(dim=-1).double()
    excess = slope - 1
    # The limit of excess / (1 - number**-excess) at 0 is 1 / log(number).
    ratio = torch.where(excess.abs() < MIN_SLOPE, 1 / number.log(), excess / -torch.expm1(-excess * number.log()))
    log_k = (ratio.log() + mu.double() * math.log(2)) / slope
    log_k = torch.where(slope < MIN_SLOPE, number.log(), log_k)
    # A single token has no slope and leaves no choice.
    log_k = torch.where(number > 1, log_k, 0.0).clamp(min=0.0)
    count = torch.where(log_k < number.log(), log_k.clamp(max=40.0).exp().floor(), number)
    return count.long().clamp(min=1)


def drop_likeliest(kept: torch.Tensor, inputs: ExtendInputs) -> torch.Tensor:
    """Apply XTC: of the tokens that reach the threshold keep only the last one in order, if the coin says so."""
    log_mass = kept.double().exp().sum(dim=-1).log()
    cut = (log_mass + inputs.float_column(LOG_XTC_THRESHOLD).double()).float().unsqueeze(1)
    above = (kept >= cut) & (kept > NO_CUT)
    least = torch.where(above, kept, float("inf")).amin(dim=-1, keepdim=True)
    ids = torch.arange(kept.shape[1], device=kept.device)
    last = torch.where(above & (kept == least), ids, -1).amax(dim=-1, keepdim=True)
    drop = above & (ids != last) & is_xtc_triggered(inputs).unsqueeze(1)
    return torch.where(drop, NO_CUT, kept)


def is_xtc_triggered(inputs: ExtendInputs) -> torch.Tensor:
    """Return [E] bool, True if the coin of the position triggers XTC."""
    zero = torch.zeros_like(inputs.position)
    counter = torch.stack(
        (zero, inputs.position, inputs.integer_column(CHOICE), torch.full_like(zero, XTC_STREAM)), dim=-1
    )
    return philox4x32(counter, inputs.key.t())[:, 0] >> 8 < inputs.integer_column(XTC_COIN)


def update_mirostat_mu(
    logits: torch.Tensor, inputs: ExtendInputs, log_mass: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return mirostat's mu after the tokens of a step; rows without mirostat or without a token keep their mu.

    Args:
        logits: [S, vocab] float32, as `extend` left them.
        inputs: Parameters of the E rows.
        log_mass: [E] float32, the result of `extend`.
        token_ids: [S] int64; negative if the row has no token.

    Returns:
        [E] float32, surprise in bits.
    """
    chosen = token_ids.index_select(0, inputs.rows)
    surprise = (log_mass - logits[inputs.rows, chosen.clamp(min=0)]) * (1 / math.log(2))
    mu = inputs.float_column(MIROSTAT_MU)
    moved = mu - inputs.float_column(MIROSTAT_ETA) * (surprise - inputs.float_column(MIROSTAT_TAU))
    return torch.where((chosen >= 0) & (inputs.integer_column(MIROSTAT) > 0), moved, mu)


MAX_TOKENS = 1 << 21
"""Number of tokens that DRY processes together; each takes about 200 bytes."""


def penalize_repetitions(logits: torch.Tensor, inputs: DryInputs) -> None:
    """Apply the DRY penalty: lower the logits of tokens that would continue a repetition.

    The rows of [S, vocab] float32 logits are changed in place.
    """
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
    # A token that followed several matches is penalized for the longest one.
    most = torch.zeros((len(tokens), logits.shape[1]), device=logits.device)
    most.scatter_reduce_(1, tokens[:, :-1].clamp(min=0), penalty, "amax")
    logits[inputs.rows] = logits[inputs.rows] - most


def common_prefixes(tokens: torch.Tensor, longest: int) -> torch.Tensor:
    """Return how many tokens from k on equal those from 0 on, for every k >= 1.

    Lengths are exact up to `longest`; longer ones are at least `longest`. Blocks of 1, 2, 4, ... tokens are numbered
    so that equal blocks have equal numbers. The length is then composed from the largest block down, in as many steps
    as it has bits.

    Args:
        tokens: [D, N] int64; -1 after the end of a row.
        longest: Length up to which the result is exact.

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

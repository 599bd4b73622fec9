"""The fields of beam search, and what they cannot be combined with."""

from __future__ import annotations

from gateway.api.common.fields import SamplingFields
from gateway.api.common.speculation_fields import SpeculativeField
from gateway.api.common.structured_fields import TextFormat
from gateway.flow.beam_state import BeamParams
from shared.errors import InvalidRequestError
from shared.sampling_params import MAX_LOGPROBS

MAX_LENGTH_PENALTY = 10.0

_IDLE: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "typ_p": (1.0,),
    "top_n_sigma": (0.0, -1.0),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "xtc_probability": (0.0,),
    "dynatemp_range": (0.0,),
    "mirostat": (0,),
    "dry_multiplier": (0.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "repetition_detection": (),
    "seed": (),
    "response_format": (),
    "structured_outputs": (),
    "tools": ([],),
    "thinking_token_budget": (),
    "speculative": (SpeculativeField(enabled=False),),
    "prediction": (),
}
"""What beam search does not take -> values that ask for nothing, besides null."""


def beam_params(fields: SamplingFields, n: int, best_of: int) -> BeamParams | None:
    """What the fields ask for; None without use_beam_search. Raises InvalidRequestError naming the field at fault."""
    if not fields.use_beam_search:
        for name, given in (
            ("length_penalty", fields.length_penalty not in (None, 1.0)),
            ("early_stopping", fields.early_stopping not in (None, False)),
        ):
            if given:
                raise InvalidRequestError(f"{name} goes with use_beam_search.", param=name)
        return None
    for name, idle in _IDLE.items():
        value = getattr(fields, name, None)
        if value is not None and value not in idle and not isinstance(value, TextFormat):
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search.", param=name)
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        message = f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}], got {penalty}."
        raise InvalidRequestError(message, param="length_penalty")
    early = fields.early_stopping or False
    if isinstance(early, str) and early != "never":
        raise InvalidRequestError('early_stopping must be true, false or "never".', param="early_stopping")
    if best_of > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"Beam search has at most {MAX_LOGPROBS} beams, got {best_of}.", param="best_of" if best_of > n else "n"
        )
    return BeamParams(width=best_of, num_returned=n, length_penalty=penalty, early_stopping=early)

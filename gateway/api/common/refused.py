"""Fields that other servers or other routes accept and a route does not, with the reason in its 400 response.

A field is looked up here only if the route's struct lacks it. A field that is in neither is unknown.
"""

from __future__ import annotations

_CHAT = "it applies only to chat"
_COMPLETIONS = "it applies only to completions"
_CODE = "code sent by clients is never executed"
_GUIDED = "send structured_outputs instead"
_LORA = "adapters are not supported"
_TEMPLATE = "the model's own chat template is used"
_SAMPLERS = "the order of sampling is fixed"
TEXT_ONLY = "models read and write text only"
SERVER = "the server decides this"

UNSUPPORTED: dict[str, str] = {
    "add_generation_prompt": _CHAT,
    "audio": TEXT_ONLY,
    "best_of": "chat supports only n",
    "cache_prompt": "prefixes are always cached; cache_salt separates them",
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _CHAT,
    "continue_final_message": _CHAT,
    "custom_logit_processor": _CODE,
    "custom_params": _CODE,
    "data_parallel_rank": SERVER,
    "detokenize": "the output is always text; return_token_ids adds the token ids",
    "disaggregated_params": SERVER,
    "documents": _CHAT,
    "dry_penalty_range": "send dry_penalty_last_n instead",
    "ebnf": _GUIDED,
    "echo": _COMPLETIONS,
    "frequency_bias": "send logit_bias or frequency_penalty instead",
    "function_call": "send tool_choice instead",
    "functions": "send tools instead",
    "grammar": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_decoding_backend": SERVER,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "id_slot": SERVER,
    "include_reasoning": _CHAT,
    "input_ids": "send prompt instead, which may be token ids",
    "json_schema": _GUIDED,
    "kv_transfer_params": SERVER,
    "logits_processors": _CODE,
    "logprob_token_ids": "send logprobs instead",
    "lora": _LORA,
    "lora_path": _LORA,
    "lora_request": _LORA,
    "max_new_tokens": "send max_tokens instead",
    "messages": _CHAT,
    "min_keep": _SAMPLERS,
    "mirostat_ent": "send mirostat_tau instead",
    "mirostat_lr": "send mirostat_eta instead",
    "mm_processor_kwargs": TEXT_ONLY,
    "modalities": TEXT_ONLY,
    "moderation": "",
    "n_cmpl": "send n instead",
    "n_discard": "the context is never shifted",
    "n_keep": "the context is never shifted",
    "n_predict": "send max_tokens instead",
    "n_probs": "send logprobs instead",
    "parallel_tool_calls": _CHAT,
    "penalize_nl": "send logit_bias instead",
    "post_sampling_probs": "log-probabilities are those before sampling",
    "prediction": _CHAT,
    "prompt": _COMPLETIONS,
    "prompt_cache_options": "prefixes are always cached",
    "prompt_embeds": "prompts are text or token ids",
    "reasoning": "send reasoning_effort instead",
    "reasoning_effort": _CHAT,
    "reasoning_format": "",
    "regex": _GUIDED,
    "repeat_last_n": "repetition_penalty applies to the whole text",
    "repeat_penalty": "send repetition_penalty instead, which applies to the whole text",
    "request_id": "send the header x-request-id instead",
    "return_hidden_states": "",
    "return_progress": "",
    "return_tokens": "send return_token_ids instead",
    "rid": "send the header x-request-id instead",
    "samplers": _SAMPLERS,
    "session_id": "send prompt_cache_key instead",
    "stream_interval": SERVER,
    "suffix": _COMPLETIONS,
    "t_max_predict_ms": "",
    "thinking_token_budget": _CHAT,
    "timings_per_token": "",
    "tool_choice": _CHAT,
    "tools": _CHAT,
    "top_logprobs": _CHAT,
    "top_p_min": "",
    "verbosity": "",
    "vllm_xargs": "",
    "web_search_options": "there is no web search",
}
"""Reason or replacement of each refused field; empty if there is neither."""

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "logits_processors": ([],),
    "n_probs": (0,),
    "n_keep": (0,),
    "parallel_tool_calls": (True,),
    "post_sampling_probs": (False,),
    "return_hidden_states": (False,),
    "return_progress": (False,),
    "suffix": ("",),
    "timings_per_token": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "cache_prompt": (True,),
    "detokenize": (True,),
    "prompt_cache_options": ({"mode": "implicit"},),
    "verbosity": ("medium",),
}
"""Values of unsupported fields that have no effect and are therefore accepted."""


def refusal_text(name: str) -> str:
    """Return the error message for an unsupported field."""
    message = f"This value of {name} is not supported" if name in NO_EFFECT else f"{name} is not supported"
    return f"{message}: {reason}." if (reason := UNSUPPORTED[name]) else f"{message}."

"""Fields that other servers, or other routes, take and this one does not: each with what its 400 says.

An endpoint's struct is asked first: only what it lacks is refused. A field that is neither there nor here is unknown.
"""

from __future__ import annotations

_GUIDED = "send structured_outputs"
_LORA = "adapters are not supported"
_TEMPLATE = "the model's own chat template is used"
_SAMPLERS = "the order of sampling is fixed"
TEXT_ONLY = "models here read and write text only"
SERVER = "that is the server's to decide"

UNSUPPORTED: dict[str, str] = {
    "add_generation_prompt": "it goes with chat",
    "audio": TEXT_ONLY,
    "best_of": "chat has n alone",
    "cache_prompt": "prefixes are always cached; cache_salt keeps them apart",
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": "it goes with chat",
    "continue_final_message": "it goes with chat",
    "custom_logit_processor": "code of clients is never run",
    "custom_params": "code of clients is never run",
    "data_parallel_rank": SERVER,
    "detokenize": "answers are text; return_token_ids adds their ids",
    "disaggregated_params": SERVER,
    "documents": "it goes with chat",
    "dry_penalty_range": "its name is dry_penalty_last_n",
    "ebnf": _GUIDED,
    "echo": "it goes with completions",
    "frequency_bias": "send logit_bias or frequency_penalty",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "grammar": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_decoding_backend": SERVER,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "id_slot": SERVER,
    "include_reasoning": "it goes with chat",
    "input_ids": "send prompt, which may be token ids",
    "json_schema": _GUIDED,
    "kv_transfer_params": SERVER,
    "logits_processors": "code of clients is never run",
    "logprob_token_ids": "send logprobs",
    "lora": _LORA,
    "lora_path": _LORA,
    "lora_request": _LORA,
    "max_new_tokens": "send max_tokens",
    "messages": "it goes with chat",
    "min_keep": _SAMPLERS,
    "mirostat_ent": "its name is mirostat_tau",
    "mirostat_lr": "its name is mirostat_eta",
    "mm_processor_kwargs": TEXT_ONLY,
    "modalities": TEXT_ONLY,
    "moderation": "",
    "n_cmpl": "send n",
    "n_discard": "a context is never shifted",
    "n_keep": "a context is never shifted",
    "n_predict": "send max_tokens",
    "n_probs": "send logprobs",
    "parallel_tool_calls": "it goes with chat",
    "penalize_nl": "send logit_bias",
    "post_sampling_probs": "log-probabilities are the model's own",
    "prediction": "it goes with chat",
    "prompt": "it goes with completions",
    "prompt_cache_options": "prefixes are always cached",
    "prompt_embeds": "prompts are text or token ids",
    "reasoning": "send reasoning_effort",
    "reasoning_effort": "it goes with chat",
    "reasoning_format": "",
    "regex": _GUIDED,
    "repeat_last_n": "repetition_penalty counts the whole text",
    "repeat_penalty": "send repetition_penalty, which counts the whole text",
    "request_id": "send the header x-request-id",
    "return_hidden_states": "",
    "return_progress": "",
    "return_tokens": "send return_token_ids",
    "rid": "send the header x-request-id",
    "samplers": _SAMPLERS,
    "session_id": "send prompt_cache_key",
    "stream_interval": SERVER,
    "suffix": "it goes with completions",
    "t_max_predict_ms": "",
    "thinking_token_budget": "it goes with chat",
    "timings_per_token": "",
    "tool_choice": "it goes with chat",
    "tools": "it goes with chat",
    "top_logprobs": "it goes with chat",
    "top_p_min": "",
    "verbosity": "",
    "vllm_xargs": "",
    "web_search_options": "there is no web search",
}
"""Name -> why, or what to send instead; empty where it is merely not there."""

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
"""Values of unsupported fields that ask for nothing, and are therefore taken."""


def refusal_text(name: str) -> str:
    """What a client is told of an unsupported field."""
    what = f"This value of {name} is not supported" if name in NO_EFFECT else f"{name} is not supported here"
    why = UNSUPPORTED[name]
    return f"{what}: {why}." if why else f"{what}."

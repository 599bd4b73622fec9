"""Fields that other servers or other routes accept and a route does not, with the reason in its 400 response.

A field is looked up here only if the route's struct lacks it. A field that is in neither is unknown.
"""

from __future__ import annotations

TEXT_ONLY = "models read and write text only"
SERVER = "the server decides this"

_FIELDS_BY_REASON = {
    "it applies only to chat": (
        "add_generation_prompt chat_template_kwargs continue_final_message documents include_reasoning messages "
        "parallel_tool_calls prediction reasoning_effort thinking_token_budget tool_choice tools top_logprobs"
    ),
    TEXT_ONLY: "audio mm_processor_kwargs modalities",
    "chat supports only n": "best_of",
    "prefixes are always cached; cache_salt separates them": "cache_prompt",
    "the model's own chat template is used": "chat_template",
    "code sent by clients is never executed": "custom_logit_processor custom_params logits_processors",
    SERVER: (
        "data_parallel_rank disaggregated_params guided_decoding_backend id_slot kv_transfer_params stream_interval"
    ),
    "the output is always text; return_token_ids adds the token ids": "detokenize",
    "send dry_penalty_last_n instead": "dry_penalty_range",
    "send structured_outputs instead": (
        "ebnf grammar guided_choice guided_grammar guided_json guided_regex guided_whitespace_pattern json_schema regex"
    ),
    "it applies only to completions": "echo prompt suffix",
    "send logit_bias or frequency_penalty instead": "frequency_bias",
    "send tool_choice instead": "function_call",
    "send tools instead": "functions",
    "send prompt instead, which may be token ids": "input_ids",
    "send logprobs instead": "logprob_token_ids n_probs",
    "adapters are not supported": "lora lora_path lora_request",
    "send max_tokens instead": "max_new_tokens n_predict",
    "the order of sampling is fixed": "min_keep samplers",
    "send mirostat_tau instead": "mirostat_ent",
    "send mirostat_eta instead": "mirostat_lr",
    "send n instead": "n_cmpl",
    "the context is never shifted": "n_discard n_keep",
    "send logit_bias instead": "penalize_nl",
    "log-probabilities are those before sampling": "post_sampling_probs",
    "prefixes are always cached": "prompt_cache_options",
    "prompts are text or token ids": "prompt_embeds",
    "send reasoning_effort instead": "reasoning",
    "repetition_penalty applies to the whole text": "repeat_last_n",
    "send repetition_penalty instead, which applies to the whole text": "repeat_penalty",
    "send the header x-request-id instead": "request_id rid",
    "send return_token_ids instead": "return_tokens",
    "send prompt_cache_key instead": "session_id",
    "there is no web search": "web_search_options",
    "": (
        "moderation reasoning_format return_hidden_states return_progress t_max_predict_ms timings_per_token "
        "top_p_min verbosity vllm_xargs"
    ),
}
"""Refused fields, separated by spaces, by the reason or replacement; empty if there is neither."""
UNSUPPORTED = {name: reason for reason, names in _FIELDS_BY_REASON.items() for name in names.split()}
"""Reason of each refused field."""

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

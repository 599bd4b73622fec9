"""Request pipeline and response parts that the OpenAI, Responses and Anthropic APIs share.

A request passes through fields (parse), options (validate), chat_prompt or prompts (render), grammar (compile) and
prepared (build). fan_in runs it, and envelope, logprobs and resumable shape the response.
"""

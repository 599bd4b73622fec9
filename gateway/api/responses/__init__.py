"""OpenAI's Responses API: fields, items, shapes and routes."""

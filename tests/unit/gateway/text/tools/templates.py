"""Chat templates that are structured like those of real models: tools, calls and results."""

from __future__ import annotations

QWEN = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools> Use <tool_call>\\n' }}
    {{- '{"name": <name>, "arguments": <args>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{% if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}{{ '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""

LLAMA = """\
{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n' }}
{%- if tools is not none %}{{ 'Respond with {"name": function name, "parameters": dictionary}.\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n<|python_tag|>{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{ tool_call.arguments | tojson }}{{ '}<|eom_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n' }}{{ message.content | tojson }}{{ '<|eot_id|>' }}
    {%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for tool_call in message['tool_calls'] %}
            {%- set out = tool_call.function|tojson %}{{ out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}{{ ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}{{ ']' + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if message.tool_call_id|length != 9 %}
            {{- raise_exception('Tool call IDs should be of length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message['content'] + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""

MINISTRAL = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}{{ message['content'] or '' }}
        {%- for tool in message['tool_calls'] or [] %}
            {%- set arguments = tool['function']['arguments'] %}
            {%- if arguments is not string %}{% set arguments = arguments|tojson %}{% endif %}
            {{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
    {%- else %}{{ '[INST]' + message['content'] + '[/INST]' }}{% endif %}
{%- endfor %}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{% endif %}"""

DEEPSEEK_V3 = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] }}
            {{- '<｜tool▁sep｜>' + tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ '<｜tool▁calls▁end｜>' }}
    {%- else %}{{ message['content'] }}{% endif %}
{%- endfor %}"""

DEEPSEEK_V31 = """\
{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}
{%- for message in messages %}
    {%- for tool in message['tool_calls'] or [] %}
        {{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' }}
        {{- tool['function']['arguments']|tojson + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
    {%- else %}{{ message['content'] }}{% endfor %}
{%- endfor %}"""

GPT_OSS = """\
{%- if tools %}{{ 'namespace functions {' }}
    {%- for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '}' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' ~ tool_call.name }}
        {{- ' <|constrain|>json<|message|>' ~ (tool_call.arguments|tojson) ~ '<|call|>' }}
    {%- elif message.role == 'tool' %}{{ '<|start|>functions.' ~ message.name ~ '<|message|>' ~ message.content }}
    {%- else %}{{ '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' }}{% endif %}
{%- endfor %}{% if false %}{{ '<|channel|>analysis<|message|>' }}{% endif %}"""

PYTHONIC = """\
{%- if tools %}{{ 'Put calls in the format [func_name1(params_name1=params_value1), func_name2(params)]' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content }}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] + '<end_of_turn>\\n' }}
{%- endfor %}"""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""

QWEN_XML = QWEN.replace(
    """{{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}""",
    """{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- for key, value in tool_call.arguments|items %}
                {{- '<parameter=' + key + '>\\n' }}{{ value | string }}{{ '\\n</parameter>\\n' }}
            {%- endfor %}{{ '</function>\\n</tool_call>' }}""",
)
assert "<function=" in QWEN_XML

FUNCTION_GEMMA = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<start_of_turn>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- for tool_call in message['tool_calls'] or [] %}
        {{- '<start_function_call>call:' + tool_call['function']['name'] }}
        {{- tool_call['function']['arguments'] | tojson }}
    {%- endfor %}
{%- endfor %}"""

"""Chat templates: supported Jinja features, forbidden operations, and limits of time and size."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from gateway.text import chat_template
from gateway.text.chat_template import ChatTemplate
from shared.errors import InvalidRequestError

USER = [{"role": "user", "content": "Hi <b>&</b>"}]


def render(source: str, messages: Any = USER, *, tools: Any = None, prompt: bool = True, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, max_seconds=0.5)
    return template.render(messages, tools, prompt, kwargs)


CASES = [
    ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}",
     "<s>user: Hi <b>&</b></s>"),
    ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\ny", "x\ny"),
    (("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
     "{% endfor %}"), "02"),
    ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
    ("{% generation %}a{{ messages | length }}{% endgeneration %}", "a1"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    (("{% for x in ['a', 'b', 'c'] %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
     "{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}"),
     "1TrueFalse3b2FalseFalse3ac3FalseTrue3b"),
    ("{% for x in [] %}a{% else %}none{% endfor %}", "none"),
    ("{% for k, v in {'a': 1}.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "a=1"),
    ("{% macro f(x) %}[{{ x | trim | upper }}]{% endmacro %}{{ f(' a ') }}", "[A]"),
    ("{{ messages | map(attribute='role') | join(', ') }}{{ 'a,b'.split(',')[-1] }}", "userb"),
    (("{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}"
     "{% endfor %}"), "123"),
    ("{{ 'yes' if add_generation_prompt and not tools and thinking else 'no' }}", "yes"),
    ("{{ '%s-%d' % ('a', 3) }}{{ '{}'.format(4) }}{{ 'abc'.replace('b', 'xx') }}", "a-34axxc"),
    ("{{ messages[::-1][0].content[:2] }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
     "Hi1"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), CASES)
def test_features_that_templates_use_render_as_in_transformers(source: str, text: str) -> None:
    variables = {"documents": None, "bos_token": "<s>", "eos_token": "</s>", "thinking": True}
    expected = _compile_jinja_template(source).render(
        messages=USER, tools=None, add_generation_prompt=True, **variables
    )
    assert render(source, thinking=True) == expected == text


def test_strftime_now_gives_the_date() -> None:
    assert re.fullmatch(r"\d{2} \w{3} \d{4}", render("{{ strftime_now('%d %b %Y') }}"))


def test_raise_exception_is_a_400_with_its_message() -> None:
    source = "{% if messages[0].role == messages[1].role %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match=r"^Roles must alternate!$") as caught:
        render(source, [USER[0], USER[0]])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__}'.format('') | length + raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ undefined_name.attribute }}",
        "{{ messages[0].content + none }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_forbidden_operations_and_failures_are_400s_without_addresses(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template cannot render") as caught:
        render(source)
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|/work|site-packages", caught.value.message)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**(10**9) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        (
            "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}"
            "{% endfor %}"
        ),
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ ('a' * 30000000).replace('a', 'aaaaaaaaaa') }}",
        "{{ ('a' * 30000000) | replace('a', 'aaaaaaaaaa') }}",
        "{{ ('a' * 30000000).join(['b'] * 1000) }}",
        "{{ (['b'] * 1000) | join('a' * 30000000) }}",
        "{{ range(99999) | map('center', 9999999) | join }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ [1] | tojson(indent=1000000) }}",
        "{{ lipsum(1000) }}",
    ],
)
def test_bombs_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_a_conversation_may_have_many_messages() -> None:
    """The text rendered so far is not counted again for each message."""
    turn = "{{ '<|' + m.role + '|>' }}{{ m.content }}{{ eos_token }}\n"
    messages = [{"role": "user", "content": "some words " * 10}] * 4096
    text = render("{% for m in messages %}" + turn + "{% endfor %}", messages)
    assert text == ("<|user|>" + "some words " * 10 + "</s>\n") * 4096


def test_too_long_conversations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 100)
    assert len(render("{% for i in range(100) %}a{% endfor %}")) == 100
    with pytest.raises(InvalidRequestError, match="more than 100 characters"):
        render("{% for i in range(101) %}a{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        *("{% for %}", "{{ 'a", "{% endif %}", "{{ " + "(" * 5000, "{% generation %}"),
        "x" * (chat_template.MAX_SOURCE + 1),
    ],
)
def test_invalid_sources_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source, {})


def test_variables_are_those_that_only_the_request_can_set():
    source = (
        "{{ bos_token }}{% set a = 1 %}{% for m in messages %}{{ loop.index }}{{ m.role ~ a }}{% endfor %}"
        "{% for i in range(3) %}{% if enable_thinking is defined and enable_thinking %}{{ style | upper }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ raise_exception(tools) }}{% endif %}"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).variables == {"enable_thinking", "style"}
    assert ChatTemplate("{{ messages[0].content }}", {}).variables == frozenset()
    # Those of a client do not replace the renderer's.
    assert render("{{ bos_token }}{{ messages | length }}", bos_token="evil", messages_="x") == "<s>1"

"""Markdown answers on the page in a browser: display, copying, speech, safety and streaming."""

from __future__ import annotations

import asyncio
import json
import random

from gateway.flow.events import TextDelta
from tests.fakes.fake_generator import Step, spell
from tests.fakes.page import answered, no_surprises, opened, say, shot

ANSWER = """## Sorting a list

Python has **two** ways: `sorted(items)` gives a *new* list, `items.sort()` changes the list in place.
Both take a `key`; see [the documentation](https://docs.python.org/3/howto/sorting.html).

1. Choose what is compared
   - by length: `key=len`
   - without regard to case: `key=str.casefold`
2. Sort

```python
def by_length(words: list[str]) -> list[str]:
\treturn sorted(words, key=len)  # stable, so that words of the same length keep their order in the list
```

| Way | New list | Time |
|:--|:-:|--:|
| `sorted` | yes | 1.2 ms |
| `sort` | no | 1.1 ms |

> It is *stable*: what is equal keeps its order.

---
That is all. <script>alert(1)</script>"""
CONTENT = "document.querySelector('.assistant .content')"


async def test_an_answer_in_markdown(gateway, page):
    gateway.generator.script = spell(ANSWER)
    await opened(page, gateway)
    await say(page, "How do I sort a list in Python?")
    await answered(page)
    tags = await page.run(f"[...{CONTENT}.children].map(child => child.tagName + child.className).join(' ')")
    assert tags == "H4 P OL DIVcode DIVwide BLOCKQUOTE HR P"
    assert await page.run(f"{CONTENT}.querySelector('ol > li > ul > li code').textContent") == "key=len"
    assert await page.run(f"{CONTENT}.querySelector('td.right').textContent") == "1.2 ms"
    assert await page.run(f"{CONTENT}.lastChild.textContent") == "That is all. <script>alert(1)</script>"
    link = await page.run("(({href, rel, target}) => [href, rel, target])(document.querySelector('.content a'))")
    assert link == ["https://docs.python.org/3/howto/sorting.html", "noopener noreferrer", "_blank"]
    await shot(page, "markdown")
    # Toggle the raw text and back; the next answer uses the same mode.
    await page.run("document.querySelector('.plain-text').click()")
    assert await page.run(f"{CONTENT}.textContent") == ANSWER and await page.run(f"{CONTENT}.children.length") == 0
    await say(page, "Again")
    await answered(page, 2)
    assert await page.run("document.querySelectorAll('.content.plain').length") == 2
    await page.run("document.querySelectorAll('.plain-text').forEach(button => button.click())")
    shown = "[...document.querySelectorAll('.assistant .content')].map(content => content.innerHTML)"
    first, second = await page.run(shown)
    assert first == second and first.startswith("<h4")
    # The request contains the model's raw text.
    assert ANSWER in bytes(gateway.generator.requests[-1].prompt_token_ids).decode()
    await shot(page, "markdown", narrow=True)
    no_surprises(page, gateway)


async def test_code_is_copied(gateway, page):
    gateway.generator.script = spell(ANSWER)
    await opened(page, gateway)
    await page.run("(navigator.clipboard.writeText = async text => { window.copied = text; }) && 1")
    await say(page, "Hello")
    await answered(page)
    await page.run("document.querySelector('.code button').click()")
    await page.until("document.querySelector('.code button').textContent === 'Copied'")
    assert await page.run("window.copied") == ANSWER.split("```")[1].removeprefix("python\n").removesuffix("\n")
    # Without TLS, only the old clipboard API is available to another machine.
    await page.run("navigator.clipboard.writeText = undefined; 1")
    await page.run("document.addEventListener('copy', () => { window.copied = getSelection().toString(); }); 1")
    await page.run("document.querySelector('.code button').focus()")
    await page.run("document.querySelector('.code button').click()")
    await page.until("window.copied.startsWith('def by_length') && document.activeElement.tagName === 'BUTTON'")
    no_surprises(page, gateway)


async def test_blocks_are_streamed_and_announced_once(gateway, page):
    gates = [asyncio.Event() for _ in range(4)]
    pieces = ["First *bl", "ock*.\n\nSecond", " block.\n\n```js\na", "\nb", "\n```\n"]
    steps: list[Step] = [TextDelta(0, pieces[0], [1])]
    for gate, piece in zip(gates, pieces[1:], strict=True):
        steps += [gate, TextDelta(0, piece, [1])]
    steps[-1] = TextDelta(0, pieces[-1], [1], finish_reason="stop")
    gateway.generator.script = lambda _: steps
    await opened(page, gateway)
    await page.run("""
        window.heard = [];
        new MutationObserver(changes => changes.forEach(({addedNodes}) =>
          addedNodes.forEach(node => window.heard.push(node.textContent))))
          .observe(document.getElementById('announce'), {childList: true, subtree: true});
    """)
    await say(page, "Go")
    await page.until(f"{CONTENT}?.textContent === 'First *bl'")
    assert await page.run("window.heard") == []
    gates[0].set()
    await page.until(f"{CONTENT}.textContent === 'First block.Second'")
    gates[1].set()
    await page.until(f"{CONTENT}.querySelector('pre')?.textContent === 'a'")
    assert await page.run("window.heard") == ["First block.", "Second block."]
    # Growing code stays the same element, so a selection in it remains.
    await page.run(f"[window.first, window.code] = [{CONTENT}.firstChild, {CONTENT}.querySelector('code')]; 1")
    await page.run("getSelection().setBaseAndExtent(window.code.firstChild, 0, window.code.firstChild, 1)")
    gates[2].set()
    await page.until("window.code.textContent === 'a\\nb'")
    assert await page.run("getSelection().toString()") == "a"
    gates[3].set()
    await answered(page)
    assert await page.run(f"window.first === {CONTENT}.firstChild && window.code.isConnected")
    assert await page.run("window.heard") == ["First block.", "Second block.", "a\nb", "The response is complete."]
    assert await page.run("document.getElementById('log').getAttribute('aria-live')") is None
    no_surprises(page, gateway)


HOSTILE = (
    "<img src=x onerror=alert(1)>", "![a](https://evil.example/x.png)", "[a](javascript:alert(1))", "\0", "<!--", "]]>",
    '[a](https://evil.example/"onclick="x)', "[*](data:text/html,x)", "\n```<script>\n", "`", "**", "\n- ", "\n> ",
    "|a|b|\n|-|-|\n", "<a href='javascript:x'>", "&#106;avascript:", "\u202e", "\n# ", "[a]: x\n", "<style>*{}</style>",
    "https://evil.example/<b>", "[![b](https://e.example)](https://f.example)", "\n1. ", "[a](vbscript:x)", "\ud800",
)  # fmt: skip
# Render each text piece by piece and return the names of the resulting elements and attributes.
DRAW = """(async texts => {
  const { Prose } = await import("/page/prose.js");
  const seen = new Set();
  for (const text of texts) {
    const prose = new Prose(false);
    document.getElementById("log").append(prose.element);
    for (let at = 0; at < text.length; at += 7) prose.append(text.slice(at, at + 7));
    prose.finish();
    for (const element of prose.element.querySelectorAll("*")) {
      seen.add(element.tagName);
      for (const { name, value } of element.attributes) {
        seen.add(name === "href" ? name + new URL(value).protocol : name);
      }
    }
  }
  await new Promise(resolve => setTimeout(resolve, 50));
  return [...seen];
})"""
ELEMENTS = {
    "P", "A", "PRE", "CODE", "DIV", "SPAN", "BUTTON", "UL", "OL", "LI", "BLOCKQUOTE", "STRONG", "BR", "EM", "H3",
    "TABLE", "THEAD", "TBODY", "TR", "TH", "TD",
}  # fmt: skip
ATTRIBUTES = {"hrefhttps:", "rel", "target", "title", "dir", "class", "type", "aria-label", "scope", "data-language"}


async def test_hostile_answers(gateway, page):
    """Any text gives only Markdown's elements, without handlers or styles, and causes no requests."""
    generator = random.Random(3)
    texts = ["".join(generator.choices(HOSTILE, k=generator.randrange(1, 40))) for _ in range(150)]
    await opened(page, gateway)
    seen = set(await page.run(f"{DRAW}({json.dumps(texts)})"))
    assert seen <= ELEMENTS | ATTRIBUTES and {"P", "A", "CODE", "TABLE", "hrefhttps:"} <= seen
    no_surprises(page, gateway)

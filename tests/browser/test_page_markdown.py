"""A model's text on the page: Markdown and formulas as elements, everything else as text."""

import pytest

from tests.support.http.page_browser import ask, is_answered

MARKDOWN = r"""## Title
Some *italics*, **bold** and ~~old~~, a [link](https://example.org/a?b=1) and https://example.com/bare
next line

1. one
2. two with $e^{i\pi}$
   - inner

| Colour | nm |
|---|--:|
| Red | 700 |

> quoted

$$
\int_0^1 x^2\,dx = \frac13
$$

Inline \(a_1\) and \[\sum_k k\] but $5 and $6 are money; $\nothing{$ stays.

    indented code
"""


@pytest.fixture
def shown(visit, server):
    """Asks for a text as the model's answer, and gives the page."""

    def show(text: str):
        server.answers(text)
        server.engine.group = 64
        page = visit()
        ask(page, "Show me.")
        is_answered(page, 1)
        return page

    return show


def test_markdown(shown):
    page = shown(MARKDOWN)

    def texts(selector: str) -> list[str]:
        return page.locator(f".text {selector}").all_inner_texts()

    assert texts("h2") == ["Title"]
    assert texts("em") == ["italics"]
    assert texts("strong") == ["bold"]
    assert texts("s") == ["old"]
    assert page.locator(".text a").evaluate_all("links => links.map(a => [a.href, a.target, a.rel])") == [
        ["https://example.org/a?b=1", "_blank", "noopener noreferrer"],
        ["https://example.com/bare", "_blank", "noopener noreferrer"],
    ]
    assert page.locator(".text p >> nth=0").inner_text().endswith("bare\nnext line")
    assert texts("ol > li > ul > li") == ["inner"]
    assert texts("th") == ["Colour", "nm"]
    assert page.evaluate("getComputedStyle(document.querySelector('td:last-child')).textAlign") == "right"
    assert texts("blockquote") == ["quoted"]
    assert texts("pre") == ["indented code"]
    assert page.locator(".text math").count() == 4
    assert page.locator(".text math[display=block]").count() == 2
    assert page.locator(".text li math msup").count() == 1
    last = page.locator(".text p").last.inner_text()
    assert "$5 and $6 are money" in last
    assert r"$\nothing{$ stays" in last


CODE = """```python
# note "x"
def f(a):
    return 'it\\'s' if a > 0x1F else None
```

```sql
SELECT * FROM t -- all
```

```text
def f
```

```html
<a href="x">y</a>
```

- [x] done
- [ ] to **do**
- [z] plain

A fact[^1], not [^x] or `[^2]`.

[^1]: Its source.
"""


def test_code_is_coloured_and_tasks_have_boxes(shown):
    page = shown(CODE)

    def parts(kind: str) -> list[str]:
        return page.locator(f".text .code-{kind}").all_inner_texts()

    assert parts("comment") == ['# note "x"', "-- all"]
    assert parts("keyword") == ["def", "return", "if", "else", "SELECT", "FROM", "<a", ">", "</a", ">"]
    assert parts("string") == ["'it\\'s'", '"x"']
    assert parts("number") == ["0x1F", "None"]
    assert parts("name") == ["f"]
    assert page.inner_text(".text pre >> nth=0").startswith('# note "x"\ndef f(a):\n    return')
    boxes = page.locator(".text .task input")
    assert boxes.evaluate_all("all => all.map(box => [box.checked, box.disabled])") == [[True, True], [False, True]]
    assert page.locator(".text li").all_inner_texts() == [" done", " to do", "[z] plain"]
    assert page.locator(".text sup").all_inner_texts() == ["1", "1"]
    assert page.locator(".text > div > p").all_inner_texts() == ["A fact1, not [^x] or [^2].", "1: Its source."]


def test_cut_lines_show_a_scroll_bar(shown):
    page = shown("```\n" + "x" * 500 + "\n```")
    bar = page.evaluate("""() => {
        const [pre, part] = [document.querySelector('.text pre'), '::-webkit-scrollbar'];
        return [pre.scrollWidth > pre.clientWidth, getComputedStyle(pre, part).height,
            getComputedStyle(pre, part + '-thumb').backgroundColor];
    }""")
    assert bar[:2] == [True, "9.6px"]
    assert bar[2] != "rgba(0, 0, 0, 0)"


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<style>body { display: none }</style>",
    "![picture](https://evil.example/x.png)",
    "![picture](x.png)",
    "[x](javascript:window.hit=1)",
    "[x](data:text/html,<script>window.hit=1</script>)",
    "<a href='javascript:window.hit=1'>x</a>",
    "[x]: javascript:window.hit=1\n\n[x]",
    "$\\href{javascript:window.hit=1}{x}$",
    "$\\includegraphics{https://evil.example/x.png}$",
    "$$\\text{<img src=x onerror=window.hit=1>}$$",
    "$\\class{error}{x}$ $\\style{position:fixed}{x}$ $\\htmlData{a=b}{x}$",
    "```<img src=x onerror=window.hit=1>\n<script>window.hit = 1</script>\n```",
    "| <svg onload=window.hit=1> |\n|---|\n| <math><mtext><img src=x onerror=window.hit=1> |",
]


def test_model_output_cannot_run_code(visit, server):
    """`visit` itself checks that no other host gets a request, and that no rule of the page's policy is broken."""
    page = visit()
    server.engine.group = 64
    allowed = (
        "a, p, br, code, pre, figure, figcaption, span, button, div, table, thead, tbody, tr, th, td, math, math *"
    )
    for at, text in enumerate(HOSTILE, start=1):
        server.answers(text)
        ask(page, "Show me.")
        is_answered(page, at)
        other = "(all, allowed) => all.filter(e => !e.matches(allowed)).map(e => e.outerHTML)"
        assert page.locator(".text *").evaluate_all(other, allowed) == [], text
        active = "document.querySelector('.text :is(img, svg, script, style, iframe, [style], [onerror], [onload])')"
        assert page.evaluate(active) is None, text
        links = page.locator(".text a").evaluate_all("links => links.map(a => a.protocol)")
        assert set(links) <= {"http:", "https:"}, text
        assert page.evaluate("window.hit") is None, text


def test_only_the_sanitiser_creates_markup(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("#server[data-state=ready]")
    for sink in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "new DOMParser().parseFromString('<b>x</b>', 'text/html')",
        "trustedTypes.createPolicy('mine', {createHTML: x => x})",
        "trustedTypes.createPolicy('dompurify', {createHTML: x => x})",
    ):
        # Evaluated in the page's own world, where its policy applies.
        error = f"() => {{ try {{ {sink}; return 'done'; }} catch (error) {{ return error.name; }} }}"
        assert page.evaluate(error) == "TypeError", sink
    page.close()


def test_a_stream_changes_its_last_block_only(visit, server):
    server.answers("First.\n\n" + "word " * 200, delay_s=0.02)
    page = visit()
    ask(page, "Talk.")
    page.wait_for_selector(".text > div:nth-child(2)")
    page.evaluate("window.first = document.querySelector('.text > div')")
    before = page.inner_text(".text > div:nth-child(2)")
    page.wait_for_function(
        "n => document.querySelector('.text > div:nth-child(2)').innerText.length > n", arg=len(before)
    )
    assert page.evaluate("window.first === document.querySelector('.text > div')")
    page.keyboard.press("Escape")

"""The page in a real browser: keyboard, screen readers, contrast, small screens, content security."""

from __future__ import annotations

import re

import pytest
from page_checks import ASK, OUTCOMES, Served, Visit, altered, ask, judged, needs_chromium, prompt_box, run_batch
from playwright.sync_api import Page, expect

pytestmark = needs_chromium


# For everybody


def test_keyboard_alone(visit: Visit, served: Served) -> None:
    page = visit(served)
    expect(page.locator("#scatter svg")).to_be_visible()
    press = page.keyboard.press
    for name in ("Skip to the page", "Ask"):
        press("Tab")
        expect(page.locator(":focus")).to_have_text(name)
    press("Tab")
    expect(prompt_box(page)).to_be_focused()
    page.keyboard.type("abc")
    press("Shift+Enter")
    expect(prompt_box(page)).to_have_value("abc\n")
    press("Backspace")
    page.keyboard.type("=")
    press("Enter")
    expect(page.locator("#verdict strong")).to_have_text("Verified")
    examples = page.locator("#examples-list button").all_inner_texts()
    for name in ("Ask", *examples, "Follows the prompt", "Does not"):
        press("Tab")
        expect(page.locator(":focus")).to_have_text(name)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    press("Tab")
    press("Enter")  # Undo
    expect(page.get_by_role("button", name="Follows the prompt")).to_be_focused()
    press("Tab")
    press("Tab")
    expect(page.get_by_label("Alpha", exact=True)).to_be_focused()
    press("End")
    expect(page.locator("#alpha-value")).to_have_text("1")
    prompt_box(page).focus()
    press("Control+Enter")
    expect(page.locator("#news")).to_contain_text("Verified")
    # The tabs: arrows between them, one stop for Tab.
    page.get_by_role("tab", name="Ask").focus()
    press("ArrowRight")
    expect(page.get_by_role("tab", name="Batch")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Batch")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Ask")).to_be_hidden()
    press("Tab")
    press("Tab")
    page.keyboard.insert_text('"abc="')
    press("Tab")
    expect(page.get_by_role("button", name="Start")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("button", name="Download results")).to_be_focused()  # when it is done
    press("Shift+Tab")
    press("ArrowRight")
    expect(page.get_by_role("radio", name=re.compile("^Verified"))).to_be_checked()


CONTROLS = {"button", "textbox", "slider", "radio", "tab", "link", "progressindicator", "tabpanel", "img", "table"}


def nameless(page: Page) -> list[str]:
    """Roles of what a screen reader meets without a name."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    assert len([role for role, _ in roles if role in CONTROLS]) > 5
    return [role for role, name in roles if role in CONTROLS and not name.strip()]


# Text whose contrast with what lies behind it is below the 4.5 that WCAG asks for.
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const back = rgb(getComputedStyle(e).backgroundColor);
      if (back[3] === 255) return back;
    }
    return [255, 255, 255];
  };
  const faint = [];
  let seen = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.disabled || e.closest("title, desc")) continue;
    seen += 1;
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e.closest("svg") ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent} ${ratio.toFixed(2)}`);
  }
  return { seen, faint };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_and_contrast(visit: Visit, served: Served, scheme: str) -> None:
    page = visit(served, color_scheme=scheme)
    back = [int(v) for v in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]
    assert (min(back) > 200) if scheme == "light" else (max(back) < 60)
    for changes, name in OUTCOMES:
        page.route(ASK, altered(**changes))
        ask(page)
        expect(page.locator("#verdict strong")).to_have_text(name)
        found = page.evaluate(FAINT)
        assert found["seen"] > 50
        assert found["faint"] == []
        assert nameless(page) == []
    page.get_by_text("All numbers").click()
    assert page.evaluate(FAINT)["faint"] == []
    page.unroute(ASK)
    run_batch(page, ['"abc="', "bad", '"%s"' % ("abcdefgh" * 60)], 2)
    assert page.evaluate(FAINT)["faint"] == []
    assert nameless(page) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("thead th[scope=col]").count() == 8
    assert page.locator("tbody th[scope=row]").count() == 2


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_wider_than_the_screen(visit: Visit, served: Served, width: int) -> None:
    page = visit(served, viewport={"width": width, "height": 800})
    page.route(ASK, altered(text="x" * 400))
    judged(page)
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert page.evaluate(wide) is False
    page.unroute(ASK)
    run_batch(page, ['"abc="'], 1)
    assert page.evaluate(wide) is False
    page.get_by_role("tab", name="Ask").click()
    page.set_viewport_size({"width": 500, "height": 800})  # the charts follow
    expect(page.locator("#scatter svg")).to_have_attribute(
        "width", str(page.locator("#scatter").evaluate("e => e.clientWidth"))
    )


def test_reduced_motion(visit: Visit, served: Served) -> None:
    moving = "getComputedStyle(document.getElementById('answer'), '::after').animationName"
    for reduced, expected in (("no-preference", "blink"), ("reduce", "none")):
        page = visit(served, reduced_motion=reduced)
        page.route(ASK, lambda route: None)
        ask(page)
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        assert page.evaluate(moving) == expected


def test_the_policy_allows_nothing_from_elsewhere(visit: Visit, served: Served) -> None:
    page = visit(served)
    answer = page.request.get(served.url)
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert not re.search(r'https?://|\sstyle="|\son\w+="|<script>|<style', answer.text())
    expect(page.locator("#scatter svg")).to_be_visible()
    files = {r.url.rsplit("/", 1)[1] for r in visit.requests}
    assert {"app.js", "style.css", "sdm"} <= files

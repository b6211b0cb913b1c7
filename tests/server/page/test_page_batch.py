"""The page in a real browser: many prompts from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from page_checks import ASK, Served, Visit, needs_chromium, open_batch, prompt_box, run_batch
from playwright.sync_api import Page, Request, Route, expect

pytestmark = needs_chromium


def column(page: Page, n: int) -> list[str]:
    return page.locator(f"#batch-rows tr > :nth-child({n})").all_inner_texts()


def test_batch_upload_filter_sort_download(visit: Visit, served: Served, tmp_path: Path) -> None:
    page = visit(served)
    prompts = ["abc=", "hgf=", "bad=", "a.b.=", "====", "fed="]
    lines = [json.dumps({"prompt": p, "id": i}) for i, p in enumerate(prompts)]
    lines[1:1] = ["not json", "", '{"prompt": 3}', "[1]"]
    lines += ['"cab="', '{"messages": [{"role": "user", "content": "hab="}]}', '{"prompt": "%s"}' % ("abcdefgh" * 60)]
    run_batch(page, lines, 9)
    expect(page.locator("#batch-found")).to_have_text("9 prompts in prompts.jsonl.")
    bad = page.locator("#bad-lines-list li").all_inner_texts()
    assert [re.match(r"Line (\d+):", text)[1] for text in bad] == ["2", "4", "5"]  # type: ignore[index]
    asked = [*prompts, "cab=", "hab="]
    expected = served.lm.generate(asked, progress=False)
    names = [
        "Out of distribution" if v.out_of_distribution else ("Verified" if v.verified else "Judged wrong") if v.accepted
        else "Not verified"
        for v in expected
    ]  # fmt: skip
    assert column(page, 1) == ["1", "6", "7", "8", "9", "10", "11", "12", "13"]
    assert column(page, 2) == [*names, "Error"]
    assert column(page, 3)[:-1] == asked
    answers = page.locator("#batch-rows tr > :nth-child(4) > div").all_inner_texts()
    assert [text.strip() for text in answers[:-1]] == [v.text.strip() for v in expected]
    assert page.locator(".reason-cell").all_inner_texts()[:-1] == [v.reason for v in expected]
    assert "tokens" in column(page, 4)[-1]
    # Filter.
    assert "Verified" in names
    for name in ("Verified", "Judged wrong", "Not verified", "Out of distribution", "Error"):
        page.get_by_role("radio", name=re.compile(f"^{name}")).check(force=True)
        shown = [name] * [*names, "Error"].count(name)
        expect(page.locator("#batch-rows tr")).to_have_count(len(shown))
        assert column(page, 2) == shown
        expect(page.locator("#batch-none")).to_be_visible(visible=not shown)
    page.get_by_role("radio", name="All").check(force=True)
    # Sort: rows without a value stay last.
    head = page.get_by_role("columnheader", name="SDM output")
    for direction in ("ascending", "descending"):
        head.get_by_role("button").click()
        expect(head).to_have_attribute("aria-sort", direction)
        order = sorted(range(8), key=lambda i: expected[i].probability, reverse=direction == "descending")
        found = column(page, 3)
        values = [expected[asked.index(p)].probability for p in found[:-1]]
        assert values == pytest.approx([expected[i].probability for i in order])
        assert found[-1].startswith("abcdefgh")
    # Download.
    with page.expect_download() as download:
        page.get_by_role("button", name="Download results").click()
    assert download.value.suggested_filename == "results.jsonl"
    download.value.save_as(tmp_path / "results.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text("utf-8").splitlines()]
    assert [r["line"] for r in rows] == [1, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [r.get("id") for r in rows[:6]] == list(range(6))
    assert [r["outcome"] for r in rows] == [name.lower() for name in [*names, "Error"]]
    for row, v in zip(rows[:8], expected, strict=True):
        assert (row["answer"], row["sdm"]["verdict"], row["sdm"]["accepted"]) == (v.text, v.verdict, v.accepted)
    assert "tokens" in rows[-1]["error"]


def test_why_shows_the_evidence_of_a_row(visit: Visit, served: Served) -> None:
    page = visit(served)
    run_batch(page, ['"abc="', '"hgf="'], 2)
    page.get_by_role("button", name="Why, line 2").click()
    expect(page.get_by_role("tab", name="Ask")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#reason")).to_have_text(served.lm.generate("hgf=", progress=False).reason)
    expect(prompt_box(page)).to_have_value("hgf=")
    expect(page.locator("#similarity svg")).to_be_visible()


def test_batch_by_pasting_and_dropping(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.get_by_role("tab", name="Batch").click()
    found, start = page.locator("#batch-found"), page.get_by_role("button", name="Start")
    expect(start).to_be_disabled()
    page.get_by_label("Or paste lines").fill('{"prompt": "abc="}')
    expect(found).to_have_text("1 prompt.")
    expect(start).to_be_enabled()
    drop = """(zone, bytes) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], "dropped.jsonl"));
      zone.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.locator("#drop").evaluate(drop, list(b'"abc="\r\n"cab="\r\n'))
    expect(found).to_have_text("2 prompts in dropped.jsonl.")
    page.locator("#drop").evaluate(drop, [0x22, 0xE9, 0x22])  # Latin-1
    expect(page.locator("#problem")).to_contain_text("dropped.jsonl is not UTF-8")
    expect(start).to_be_disabled()


def test_batch_waits_for_a_busy_server_and_stays_within_its_bound(visit: Visit, served: Served) -> None:
    page = visit(served)
    tries: dict[str, int] = {}
    open_now, most = 0, 0

    def handle(route: Route) -> None:
        nonlocal open_now, most
        prompt = (route.request.post_data_json or {})["messages"][0]["content"]
        tries[prompt] = tries.get(prompt, 0) + 1
        if tries[prompt] == 1 and prompt in ("abc=", "cab="):
            busy = {"error": {"message": "busy"}}
            route.fulfill(status=429, json=busy, headers={"Retry-After": "1"})
        else:
            route.continue_()

    def begun(request: Request) -> None:
        nonlocal open_now, most
        open_now += request.url.endswith("/completions")
        most = max(most, open_now)

    def ended(request: Request) -> None:
        nonlocal open_now
        open_now -= request.url.endswith("/completions")

    page.on("request", begun)
    page.on("requestfinished", ended)
    page.route(ASK, handle)
    words = ["abc=", "cab=", "bad=", "fed=", "hag=", "gab=", "bag=", "dab=", "ebb=", "egg="]
    run_batch(page, [json.dumps(w) for w in words], 10)
    assert {w: tries[w] for w in words} == {w: 2 if w in ("abc=", "cab=") else 1 for w in words}
    assert "Error" not in column(page, 2)
    assert 2 <= most <= 4


def test_batch_cancel(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: None if "hgf" in (route.request.post_data or "") else route.continue_())
    open_batch(page, ['"abc="', *['"hgf="'] * 8])
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text("1 of 9 answered")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#news")).to_contain_text("Stopped: 1 of 9 answered")
    assert column(page, 2)[1:] == ["Cancelled"] * 8
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download results").click()
    assert len(Path(download.value.path()).read_text().splitlines()) == 1
    page.unroute(ASK)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#batch-count")).to_contain_text("9 of 9 answered")


def test_a_batch_stops_where_the_server_is_gone(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: route.abort())
    open_batch(page, ['"abc="'] * 30)
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#problem")).to_contain_text("The server does not answer")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    assert column(page, 2).count("Cancelled") >= 20


def test_many_rows_are_drawn_in_parts(visit: Visit, served: Served) -> None:
    page = visit(served)
    page.route(ASK, lambda route: route.abort())
    open_batch(page, ['"abc="'] * 700)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("button", name="Start")).to_be_enabled()
    expect(page.locator("#batch-rows tr")).to_have_count(500)
    page.get_by_role("button", name="Show more rows").click()
    expect(page.locator("#batch-rows tr")).to_have_count(700)

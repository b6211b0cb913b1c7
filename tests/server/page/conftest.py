"""A server with a page, and a browser. Both are imported where they are used: the tests skip where one is missing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from page_checks import Served, Visit
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from server_checks import trained

    return Path(shutil.copytree(trained(), tmp_path_factory.mktemp("page") / "model"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    from page_checks import serve

    yield from serve(folder)


@pytest.fixture(scope="module")
def certified(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model with a certificate at alpha 0.9, which asks for more than its region does."""
    from page_checks import serve

    from sdmlm import SDMLanguageModel
    from sdmlm.estimator.acceptance import CertifiedRule
    from sdmlm.language_model.answer_rule import AnswerCertificate, save_certificate

    home = tmp_path_factory.mktemp("certified") / "lm"
    shutil.copytree(folder, home)
    lm = SDMLanguageModel.from_pretrained(home)
    (answer,) = lm.generate(["abc="], progress=False)
    threshold = answer.probability_of_yes - 1e-4
    rule = CertifiedRule(0.9, 0.05, "overall", 0.1, (math.inf, threshold), 0.1, (1,), 40, 0, (), lm.digest())
    save_certificate(home / "sdm", AnswerCertificate(rule, 40, 36, 30, 29, None, threshold_on="output"))
    yield from serve(home)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from page_checks import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages; afterwards, none of them may have complained or asked another server."""
    from page_checks import REFUSED, Visit

    visit = Visit(browser)
    yield visit
    for context in visit.contexts:
        context.close()
    assert [text for text in visit.complaints if REFUSED not in text] == []
    assert {r.url.split("/")[2].split(":")[0] for r in visit.requests if not r.url.startswith("blob:")} <= {"127.0.0.1"}

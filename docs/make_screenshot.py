"""Takes the screenshot of the page in README.md, in a real browser, of the model that `make demo` leaves.

    python docs/make_screenshot.py runs/demo        # or: make screenshot

It starts `sdmlm serve`, asks the first test prompt whose answer is verified, and writes docs/images/page.png. It needs chromium
(apt install chromium) and the packages of `make install`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

OUTPUT = Path(__file__).parent / "images" / "page.png"


def first_verified_prompt(demo: Path) -> str:
    """The first test prompt whose answer the model verifies; else the first of all."""
    from sdmlm import SDMLanguageModel

    lines = (demo / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    prompts = [json.loads(line)["prompt"] for line in lines]
    answers = SDMLanguageModel.from_pretrained(demo / "verified").generate(prompts, neighbors=0, progress=False)
    prompt: str = next((p for p, a in zip(prompts, answers, strict=True) if a.verified), prompts[0])
    return prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the folder that `sdmlm demo` wrote")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("chromium is missing: apt install chromium")
    command = [sys.executable, "-m", "sdmlm.cli", "serve", str(args.demo / "verified"), "--port", "0"]
    prompt = first_verified_prompt(args.demo)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]  # "Serving ... on http://127.0.0.1:PORT", once it is ready
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1180, "height": 1160}, color_scheme="light")
            page.goto(url)
            page.get_by_label("Prompt", exact=True).fill(prompt)
            page.keyboard.press("Enter")
            page.locator("#reason:not(:empty)").wait_for(timeout=60_000)
            page.wait_for_timeout(1000)  # the plots move into place
            args.output.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=args.output)
            browser.close()
        finally:
            server.terminate()
    print(f"Written: {args.output}")


if __name__ == "__main__":
    main()

"""The documentation is true: its code runs, its links lead somewhere, its list of files is that of the repository."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from benchmark_modules import benchmark

from sdmlm.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *DOCS]
PAGES_WITH_CODE = [page for page in PAGES if re.search(r"^```(python|sh)$", page.read_text(encoding="utf-8"), re.M)]
NOT_HERE = ("# needs a network", "# after sdmlm demo")  # the latter run in test_demo_word_ordering.py


class Block(NamedTuple):
    """A fenced block: its language, the line its text begins on (from 1), and its text."""

    language: str
    line: int
    text: str


def fenced(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied fastest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(900)  # docs/generation.md trains the fast demo; a busy machine needs minutes for it
@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of Python share a namespace, those of `sdmlm` commands the working directory, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in fenced(page):
        where = f"{name_of(page)}, line {block.line}"
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            if not block.text.startswith(NOT_HERE):
                print(f"--- {where}")
                exec(code, names)
        elif block.language == "sh":
            for command in block.text.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(command, comments=True) or [""]
                assert program in ("", "sdmlm"), f"{where}: use a console block for what cannot run here"
                if program:
                    print(f"--- {where}: {command}")
                    assert main(arguments) == 0, f"{where}: {command}"


def test_fences_are_known() -> None:
    for page in PAGES:
        for block in fenced(page):
            assert block.language in ("python", "sh", "console", "text", "json", "math"), f"{name_of(page)}: {block}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{name_of(page)} links to {target}, which has no such heading"


def test_every_page_is_linked_from_the_readme() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", prose(ROOT / "README.md"))
    for page in DOCS:
        assert name_of(page) in links


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", [p for p in DOCS if p.name != "glossary.md"], ids=name_of)
def test_every_page_links_to_the_glossary_early(page: Path) -> None:
    text = prose(page)
    assert "glossary.md" in text, f"{name_of(page)}: link to glossary.md where the first of its words is used"
    assert text[: text.index("glossary.md")].count("\n") < 30, f"{name_of(page)} links to the glossary too late"


def test_the_answer_about_the_loss_follows_from_its_files() -> None:
    """Shares in docs/results.md against the stored runs: the mean over the seeds of the mean over 20 layers of each."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (demo|stories15m), ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \| ([+-][\d.]+) ", text, re.M)
    assert len(rows) == 4
    for name, alpha, *shown in rows:
        stored = json.loads(gzip.decompress((ROOT / "docs" / "results" / f"spread-{name}.json.gz").read_bytes()))
        place = stored["alphas"].index(float(alpha))
        shares = {
            setting: 100 * statistics.mean(
                statistics.mean(layer["test"]["admitted"][place] / layer["test"]["answers"] for layer in run["layers"])
                for run in stored["runs"].values() if run["setting"] == setting
            )
            for setting in ("sdm_hn", "ce_hn")
        }  # fmt: skip
        expected = (shares["ce_hn"], shares["sdm_hn"], shares["sdm_hn"] - shares["ce_hn"])
        assert [float(value) for value in shown] == pytest.approx(expected, abs=0.06), (name, alpha)


def stored(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))


def test_the_answers_about_gradients_and_search_follow_from_their_files() -> None:
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    for entry in stored("loss-gradients-demo.json")["epochs"]:
        shown = [f"{entry[name]:.4f}" for name in ("ce, published", "ce, crossfit", "ce, constant", "ce, two halves")]
        assert f"| {entry['epoch']} | {' | '.join(shown)} |" in lines
    text = "\n".join(lines)
    again = stored("second-answers-stories15m.json")["models"]["runs/stories-revise-own"]["continue, greedy"]["all"]
    mended = f"{again['01']} of {again['00'] + again['01']} | {again['10']} of {again['10'] + again['11']}"
    assert f"| continue, greedy | {mended} | {again['same text']} |" in text
    certified = stored("search-certified-stories15m-revise.json")["alphas"]["0.9"]
    shown = " | ".join(
        "{:+.1f} ({:.1f})".format(*(100 * x for x in certified[f"continue, budget {budget}"]["gain"]))
        for budget in (1, 2, 4)
    )
    assert f"| continue | {shown} |" in text
    for model in stored("second-answers-demo.json")["models"].values():
        n = model["continue, greedy"]["all"]
        shown = [model["first_right"], f"{n['01']} of {n['00'] + n['01']}", f"{n['10']} of {n['10'] + n['11']}"]
        assert any(line.endswith(f"| {' | '.join(map(str, shown))} | {n['same text']} |") for line in lines)
    for run in stored("search-demo-revise.json")["results"][1:]:
        shown = f"{100 * run['verified']:.1f}%, {100 * run['verified_right']:.1f}%, {run['tokens']:.0f} |"
        assert any(line.startswith(f"| {run['budget']} | ") and shown in line for line in lines), run


def test_the_tables_of_the_loss_are_those_of_their_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loss_tables.py"])
    benchmark("loss_tables").main()
    made = capsys.readouterr().out
    assert made == (ROOT / "docs" / "results" / "loss.md").read_text(encoding="utf-8")
    known = set(made.splitlines())
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    blocks = [
        text[text.index(f"<!-- {name} -->") : text.index(f"<!-- end {name} -->")]
        for name in ("pairs", "forms", "forms of stories15m")
    ]
    rows = [
        line
        for line in "\n".join(blocks).splitlines()
        if line.startswith("| ") and not line.startswith(("| model", "| form"))
    ]
    assert len(rows) > 20
    assert [line for line in rows if line not in known] == []


def test_the_table_of_the_estimator_is_that_of_its_lines() -> None:
    packed = (ROOT / "docs" / "results" / "selective.jsonl.gz").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert len({(line["data"], line["seed"], line["method"]) for line in lines}) == len(lines)
    shown = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    names = {"SDM": "**SDM, certified (default)**", "SDM, HR region": "SDM, HR region (no promise)", "VBLL": "VBLL"}
    for method, name in (names | {"logistic regression": "logistic regression"}).items():
        of = [line for line in lines if line["method"] == method]
        share = {key: statistics.fmean(line[f"{key} coverage"] for line in of) for key in ("overall", "predicted")}
        right = sum(line["overall right"] for line in of) / sum(line["overall accepted"] for line in of)
        shifted = statistics.fmean(line["overall shifted"] for line in of if line["overall shifted"] is not None)
        cells = [statistics.fmean(line["accuracy"] for line in of), share["overall"], right, shifted]
        text = " | ".join(f"{cell:.3f}" for cell in cells)
        row = f"| {name} | {text} |"
        assert row in shown.replace(f"**{share['overall']:.3f}**", f"{share['overall']:.3f}"), row


def test_the_table_of_verified_answers_is_that_of_its_file() -> None:
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    rules = [model["rule"] for model in stored("verified-demo.json")["models"].values()]
    names = ("right", "verified", "of these right", "shifted right", "shifted verified")
    for seed, rule in enumerate(rules):
        shares = " | ".join(f"{rule[name]:.1%}" for name in names)
        assert rule["other"] == rule["truncated"]
        given = f"{rule['other']:.1%} | {rule['canned']:.1%}, {rule['canned, short']:.1%}"
        assert f"| {seed} | {shares} | {given} |" in lines
    means = (
        f"{statistics.mean(v):.1%} ({100 * statistics.stdev(v):.1f})" for v in ([r[n] for r in rules] for n in names)
    )
    assert f"| mean (standard deviation) | {' | '.join(means)} | - | - |" in lines


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_paths_of_one_machine(page: Path) -> None:
    paths = re.findall(r"(?<![\w.])/(?:work|tmp|home|root|usr|mnt)\b\S*", page.read_text(encoding="utf-8"))
    assert not paths


def tree() -> list[str]:
    """The paths that the list of files in docs/architecture.md names, folders with a slash at the end."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    match = re.search(r"^## Files\n.*?^```text\n(.*?)^```$", text, re.M | re.S)
    assert match, "docs/architecture.md has no list of files"
    paths, folders = [], [""]
    for line in match[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        paths.append(folders[depth] + name)
        if name.endswith("/"):
            folders[depth + 1 :] = [folders[depth] + name]
    return paths


def test_file_tree_names_what_exists() -> None:
    for path in tree():
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}"
        assert path.endswith("/") == (ROOT / path).is_dir(), path


def test_file_tree_names_every_module() -> None:
    modules = {name_of(p) for p in (ROOT / "src" / "sdmlm").rglob("*.py") if p.name != "__init__.py"}
    missing = modules - set(tree())
    assert not missing, f"run python docs/make_file_list.py: docs/architecture.md lacks {sorted(missing)}"


def test_the_files_to_touch_exist() -> None:
    """Those of the table "Which file for what", and the new names of moved modules in the changelog."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Which file for what") : text.index("## The three ways")]
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / "src" / "sdmlm" / path).exists()] == []
    moves = re.findall(r"^  \| .* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    modules = [name for line in moves for name in re.findall(r"`(\w+(?:\.\w+)+)`", line)]
    assert len(modules) > 15
    paths = [ROOT / "src" / "sdmlm" / f"{name.replace('.', '/')}.py" for name in modules]
    assert [path.stem for path in paths if not path.exists()] == []


def test_every_option_of_ours_is_documented() -> None:
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    from sdmlm import SDMConfig

    guide = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    ours = set(SDMConfig.__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__)
    missing = {name for name in ours if f"| `{name}` |" not in guide}
    assert not missing, f"add to the table of docs/fine-tuning.md: {sorted(missing)}"

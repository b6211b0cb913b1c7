"""examples/first_steps.ipynb: its cells run, and what they print is what its text says."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def runner() -> Any:
    """docs/run_notebook.py as a module."""
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "docs" / "run_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(outputs: list[list[dict[str, Any]]]) -> str:
    return "".join("".join(output.get("text", "")) for cell in outputs for output in cell)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    try:
        outputs = runner().run_cells(notebook)
    finally:
        torch.set_num_threads(threads)
    (picture,) = (output["data"]["image/png"] for cell in outputs for output in cell if "data" in output)
    assert len(picture) > 10_000
    shown = text_of(outputs)
    shares = [float(share) for share in re.findall(r"([\d.]+)% of these right", shown)]
    assert shares[0] >= 95  # the estimator
    assert shares[1] >= 90  # the language model
    assert "Certified: with probability at least 0.95" in shown
    assert re.search(r"Of 100 answers to such prompts about [5-9]\d will be verified", shown)
    assert shown.endswith("'This answer has been checked and is right.': not verified\n")
    # The outputs in the file are those of these cells: the same but for the digits.
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [[output["output_type"] for output in cell] for cell in cells] == [
        [output["output_type"] for output in cell] for cell in outputs
    ]
    kept = text_of(cells)
    for words in ("Accepted: ", "Verified: ", "points to fit on", "held-out prompts correctly"):
        assert kept.count(words) == shown.count(words) > 0
    assert str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8")

"""Runs a notebook from its first cell to its last and writes what the cells print and draw into it.

    python docs/run_notebook.py examples/first_steps.ipynb

It needs matplotlib, but not Jupyter. A test runs the same cells.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def run_cells(notebook: dict[str, Any], names: dict[str, Any] | None = None) -> list[list[Output]]:
    """The outputs of each code cell; cells share `names`, as in Jupyter."""
    import matplotlib

    matplotlib.use("Agg")
    names = {"__name__": "__main__"} if names is None else names
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run("".join(cell["source"]), f"cell {n}", names) for n, cell in enumerate(code, start=1)]


def _run(source: str, name: str, names: dict[str, Any]) -> list[Output]:
    import matplotlib.pyplot as plt

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        exec(compile(source, name, "exec"), names)
    outputs: list[Output] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(drawn.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = iter(enumerate(run_cells(notebook), start=1))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = next(outputs)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

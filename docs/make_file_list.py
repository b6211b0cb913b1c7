"""Writes the list of files in docs/architecture.md: every module with the first sentence of its docstring.

python docs/make_file_list.py        # after a module was added, moved or renamed
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LIST = re.compile(r"(?<=^```text\nsrc/sdmlm/\n).*?(?=^```$)", re.M | re.S)


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)|\n\n", docstring, maxsplit=1)[0].replace("\n", " ")


def lines(folder: Path, depth: int = 1) -> list[str]:
    """The modules of a package, then its packages, indented by their depth."""
    indent = "  " * depth
    modules = [p for p in sorted(folder.glob("*.py")) if p.name != "__init__.py"]
    listed = [f"{indent + module.name:<28} {summary(module)}".rstrip() for module in modules]
    for package in sorted(p.parent for p in folder.glob("*/__init__.py")):
        listed += [f"{indent}{package.name}/", *lines(package, depth + 1)]
    return listed


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    replaced, count = LIST.subn(lambda _: "".join(line + "\n" for line in lines(ROOT / "src" / "sdmlm")), text)
    if count != 1:
        raise SystemExit(f"{PAGE}: there must be one text block that begins with the line src/sdmlm/")
    PAGE.write_text(replaced, encoding="utf-8")


if __name__ == "__main__":
    main()

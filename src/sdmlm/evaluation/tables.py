"""One renderer for all tables of results: terminal, Markdown, LaTeX, CSV.

What a table contains is decided elsewhere (`evaluation.selective_table`, `experiments.tables`). They give their cells as
text, and `TextTable` lays them out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

# A table that is wider than the page is scaled down; a narrow one is never scaled up.
_LATEX_TABLE = r"\begin{table*}\centering\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"


@dataclass(frozen=True)
class CellText:
    """One cell as it is written in a terminal, in Markdown, and in LaTeX (where a cell may span several columns)."""

    terminal: Text
    markdown: str
    latex: tuple[str, ...]


@dataclass(frozen=True)
class TextRow:
    """One line: its names (data set, model, ...), then its cells."""

    names: tuple[str, ...]
    cells: tuple[CellText, ...]


@dataclass(frozen=True)
class TextTable:
    """A table ready to be written.

    Parameters
    ----------
    names : heads of the columns that hold names. In a terminal they share one column: a name is printed on a line of
        its own where it changes, and only the last one stands beside the cells.
    heads : heads of the other columns.
    rows : the lines.
    latex_preamble : lines before the table in LaTeX: a comment with the packages it needs, definitions.
    latex_heads : complete header lines in LaTeX.
    latex_caption : the caption in LaTeX.
    title, caption : text above and below the table in a terminal.
    numbers_right : whether cells are aligned to the right in a terminal.
    """

    names: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[TextRow, ...]
    latex_preamble: tuple[str, ...]
    latex_heads: tuple[str, ...]
    latex_caption: str
    title: str | None = None
    caption: str | None = None
    numbers_right: bool = True

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(
            title=self.title,
            title_justify="left",
            caption=self.caption,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=0,
            min_width=60,
        )
        table.add_column(self.names[-1], no_wrap=True)
        for head in self.heads:
            table.add_column(Text(head), justify="right" if self.numbers_right else "left")
        before: tuple[str, ...] = ()
        for row in self.rows:
            *groups, name = row.names
            for depth, group in enumerate(groups):
                if row.names[: depth + 1] != before[: depth + 1]:
                    if depth == 0:
                        table.add_section()
                    table.add_row(Text(" " * depth + group, "" if depth else "bold"))
            before = row.names
            table.add_row(Text(" " * len(groups) + name), *(cell.terminal for cell in row.cells))
        return table

    def markdown(self) -> str:
        """For a page; caption and title are left to the caller."""
        lines = [[*self.names, *self.heads], ["---"] * len(self.names) + ["---:"] * len(self.heads)]
        lines += [[*row.names, *(cell.markdown for cell in row.cells)] for row in self.rows]
        return markdown_rows(lines)

    def latex(self) -> str:
        """A booktabs table* as in the papers."""
        width = sum(len(cell.latex) for cell in self.rows[0].cells) if self.rows else len(self.heads)
        lines = [
            *self.latex_preamble,
            _LATEX_TABLE,
            rf"\begin{{tabular}}{{{'l' * len(self.names)}{'c' * width}}}\toprule",
            *self.latex_heads,
        ]
        before: str | None = None
        for row in self.rows:
            group = row.names[0] if len(row.names) > 1 else ""
            if group != before:
                lines.append(r"\midrule")
            before = group
            cells = [*map(latex_escape, row.names), *(part for cell in row.cells for part in cell.latex)]
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule\end{tabular}}", rf"\caption{{{self.latex_caption}}}", r"\end{table*}", ""]
        return "\n".join(lines)


class RenderedTable:
    """Base class of tables that a `TextTable` renders: they say in `_text` what its rows and columns are."""

    def _text(self) -> TextTable:
        raise NotImplementedError

    def latex(self) -> str:
        """A booktabs table* as in the papers; the packages it needs are named in its first line."""
        return self._text().latex()

    def markdown(self) -> str:
        """For a page."""
        return self._text().markdown()

    def rich(self) -> RichTable:
        """For a terminal."""
        return self._text().rich()


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file with a header line; None becomes an empty field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()


def rounded(share: float) -> str:
    """Two decimals, and "<0.01" where rounding would turn a positive share into 0.00."""
    return "<0.01" if share > 0 and f"{share:.2f}" == "0.00" else f"{share:.2f}"


def markdown_rows(lines: Sequence[Sequence[str]]) -> str:
    """The lines of a Markdown table."""
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def latex_escape(text: str) -> str:
    """Text that LaTeX prints literally."""
    names = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater"}
    return re.sub(r"[\\~^<>&%$#_{}]", lambda m: rf"\text{names[m[0]]}{{}}" if m[0] in names else "\\" + m[0], text)

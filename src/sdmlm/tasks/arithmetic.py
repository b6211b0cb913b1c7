"""Sums of whole numbers with their working: a task that needs no data, and a reward that checks instead of comparing.

The working goes from the right, a line for each column: `7 + 5 = 12`, with the carry as a third number where there is
one, and ends with the sum in XML. A negative has one slip (a carry forgotten, or a column one off), carried through to a
wrong sum.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from sdmlm.language_model.encoding import completion_text

REFERENCE = "sum"  # the column with the right answer
PROMPT = (
    "Add {a} and {b}. Write one line for each column from the right, such as 7 + 5 = 12, with the carry as a third number "
    "where there is one, then the sum in the XML <sum> </sum>."
)
DIGITS, SHIFTED_DIGITS = (1, 4), (5, 7)  # of each number: in distribution, and beyond it


def answer(text: str) -> str | None:
    """The first tagged sum of a completion.

    >>> answer("7 + 5 = 12\\n1 = 1\\n<sum>12</sum>")
    '12'
    """
    match = re.search(r"<sum>(.*?)</sum>", text, re.DOTALL)
    return match[1].strip() if match else None


def working(a: int, b: int, slip: tuple[int, int] | None = None) -> str:
    """The whole answer. `slip` is (column, error): what is added to that column's sum and carried on.

    >>> print(working(17, 5))
    7 + 5 = 12
    1 + 0 + 1 = 2
    <sum>22</sum>
    """
    lines, digits, carry = [], [], 0
    for column in range(max(len(str(a)), len(str(b)))):
        parts = [a // 10**column % 10, b // 10**column % 10] + [carry] * (carry > 0)
        total = sum(parts) + (slip[1] if slip and slip[0] == column else 0)
        lines.append(f"{' + '.join(map(str, parts))} = {total}")
        digits.append(total % 10)
        carry = total // 10
    result = int("".join(map(str, [carry, *reversed(digits)])))
    return "\n".join([*lines, f"<sum>{result}</sum>"])


def reward(
    prompts: Sequence[Any], completions: Sequence[Any], a: Sequence[int], b: Sequence[int], **columns: Any
) -> list[int]:
    """1 where the sum is right, there is a line for each column, and every line holds."""
    return [int(_right(completion_text(text), x, y)) for text, x, y in zip(completions, a, b, strict=True)]


def _right(text: str, a: int, b: int) -> bool:
    *lines, last = text.strip().split("\n")
    if last != f"<sum>{a + b}</sum>" or len(lines) != max(len(str(a)), len(str(b))):
        return False
    carry = 0
    for column, line in enumerate(lines):
        match = re.fullmatch(r"([0-9](?: \+ [0-9]){1,2}) = ([0-9]{1,2})", line)
        if match is None:
            return False
        parts = [int(part) for part in match[1].split(" + ")]
        due = [a // 10**column % 10, b // 10**column % 10] + [carry] * (carry > 0)
        if parts != due or sum(parts) != int(match[2]):
            return False
        carry = int(match[2]) // 10
    return True


def make_row(a: int, b: int, seed: int = 0) -> dict[str, Any]:
    """The row of two numbers; the slip of its negative is drawn from the seed and the numbers."""
    rng = random.Random(f"{seed} {a} {b}")
    columns = max(len(str(a)), len(str(b)))
    chosen = working(a, b)
    slips = [(column, error) for column in range(columns) for error in (-10, -1, 1)]
    wrong = [working(a, b, slip) for slip in slips if _possible(a, b, slip)]
    return {
        "prompt": PROMPT.format(a=a, b=b),
        "chosen": chosen,
        "rejected": rng.choice(wrong),
        "a": a,
        "b": b,
        "sum": str(a + b),
    }


def _possible(a: int, b: int, slip: tuple[int, int]) -> bool:
    """A column's sum stays a number of one or two digits that a person could write: 0 to 19."""
    total = int(re.findall(r"= (-?\d+)$", working(a, b), re.MULTILINE)[slip[0]]) + slip[1]
    return 0 <= total <= 19


def make_splits(
    train: int = 5000, calibration: int = 5000, test: int = 2000, shifted: int = 2000, seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Rows by split, no pair of numbers twice, in either order; `shifted` has numbers of more digits.

    There are few pairs of small numbers, and the split that is drawn first would get most of them. So train, calibration and
    test are cut from one shuffled pool.
    """
    for name, size in (("train", train), ("calibration", calibration), ("test", test), ("shifted", shifted)):
        if not 0 <= size <= 1_000_000:
            raise ValueError(f"{name} is {size} but must be between 0 and 1,000,000.")
    rng, seen = random.Random(seed), set[tuple[int, int]]()

    def draw(n: int, digits: tuple[int, int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while len(rows) < n:
            a, b = (rng.randrange(10 ** (k := rng.randint(*digits)) // 10, 10**k) for _ in range(2))
            if (pair := (min(a, b), max(a, b))) not in seen:
                seen.add(pair)
                rows.append(make_row(a, b, seed))
        return rows

    parts = {"train": train, "calibration": calibration, "test": test}
    pool = draw(sum(parts.values()), DIGITS)
    rng.shuffle(pool)
    rows = {name: [pool.pop() for _ in range(size)] for name, size in parts.items()}
    rows["shifted"] = draw(shifted, SHIFTED_DIGITS)
    return {name: part for name, part in rows.items() if part}

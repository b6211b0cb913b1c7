"""Sentences of common words: a testbed on which a very small LM can be right nearly always.

    python benchmarks/common_sentences.py tinystories.txt --output common.txt

Every word of a sentence (without its punctuation and case) occurs at least `--least` times in the file, and no sentence has more than
`--max-words` words.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path


def words(line: str) -> list[str]:
    return [word.strip(".,;:!?\"'").lower() for word in line.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--least", type=int, default=100)
    parser.add_argument("--max-words", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    lines = [" ".join(line.split()) for line in args.sentences.read_text(encoding="utf-8").splitlines()]
    counts = Counter(word for line in lines for word in words(line))
    kept = [
        x for x in lines if len(x.split()) <= args.max_words and all(counts[word] >= args.least for word in words(x))
    ]
    args.output.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    print(f"{len(kept)} of {len(lines)} sentences")


if __name__ == "__main__":
    main()

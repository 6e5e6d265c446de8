"""Random programs, each of a seed, compared with eager PyTorch in every way that the seed draws.

    python -m tests.random_programs [--seed 17] [--programs 200] [--show]

Prints a line for each that is not equal, with what was drawn, and the exit status is 1 if any is wrong. A
seed makes one program: `--seed 17` makes that of a failure again. docs/testing.md says what is drawn.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.random_programs.comparing import check
from tests.random_programs.drawn import draw


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--programs", type=int, default=1, help="how many seeds, one after another")
    parser.add_argument("--show", action="store_true", help="print what is drawn for every seed")
    asked = parser.parse_args()
    counts, began = Counter[str](), time.monotonic()
    for seed in range(asked.seed, asked.seed + asked.programs):
        with tempfile.TemporaryDirectory() as folder:
            outcome = check(seed, Path(folder))
        counts[outcome.verdict] += 1
        if asked.show or outcome.verdict != "equal":
            print(f"{outcome.verdict}: seed {seed}: {outcome.why}", flush=True)
        if asked.show or outcome.verdict == "wrong":
            print(f"{draw(seed).describe()}\n{outcome.where}", flush=True)
    print(f"{asked.programs} programs: {dict(counts)}, {time.monotonic() - began:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

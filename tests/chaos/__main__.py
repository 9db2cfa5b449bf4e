"""python -m tests.chaos --minutes 10 --seed 0: attacks the project's promises and prints what held.

`--only NAME ...` chooses attacks; `--count NAME=N ...` makes N attempts of one, whatever time that takes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

from .harness import ATTACKS, failures, parse_counts, run_attack, table, write_json


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all attacks together, shared equally")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--count", nargs="+", default=[], metavar="NAME=N")
    parser.add_argument("--json", type=Path, help="where the table is written as JSON")
    args = parser.parse_args()
    counts = parse_counts(args.count)
    names = list(counts) or args.only
    tallies = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"chaos_{name}_") as folder:
            limit = {"count": counts[name]} if name in counts else {"seconds": 60 * args.minutes / len(names)}
            print(f"{name} ...", flush=True)
            tallies.update(run_attack(name, args.seed, Path(folder), **limit))
            if args.json:
                command = f"python -m tests.chaos {' '.join(sys.argv[1:])}"
                write_json(args.json, tallies, command=command, seed=args.seed, python=platform.python_version())
    print(table(tallies))
    return 1 if failures(tallies) else 0


if __name__ == "__main__":
    sys.exit(main())

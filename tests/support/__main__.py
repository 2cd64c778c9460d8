"""Run the fake world from the command line, above all to see a failure again.

python -m tests.support --seed 3 --ranges 4 --episode 17
python -m tests.support --seed 0 --ranges tight --steps 20000
"""

import argparse
import time

from tests.support.bugs import BUGS
from tests.support.episode_config import RANGES
from tests.support.run import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranges", choices=sorted(RANGES), default="tight")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--episode", type=int, help="run this one alone")
    parser.add_argument("--no-invariants", action="store_true", help="trust the fake workers")
    parser.add_argument("--bug", choices=sorted(BUGS), help="switch on a fault of the world's own")
    options = parser.parse_args()
    began = time.process_time()
    report = run(
        options.seed,
        RANGES[options.ranges],
        options.steps if options.episode is None else 1,
        bug=BUGS[options.bug]() if options.bug else None,
        bug_name=options.bug or "",
        check_invariants=not options.no_invariants,
        first_episode=options.episode or 0,
    )
    seconds = time.process_time() - began
    print(f"{report.num_steps} steps in {report.num_episodes} episodes, {seconds:.1f} s of CPU")
    for what, count in sorted(report.seen.items()):
        print(f"{count:8d}  {what}")


if __name__ == "__main__":
    main()

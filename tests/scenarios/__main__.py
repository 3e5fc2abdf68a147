"""python -m tests.scenarios [--update]: plays every scenario; --update rewrites the recorded results."""

from __future__ import annotations

import argparse
import sys

from tests.scenarios.runner import play_text, scenario_files


def main() -> int:
    """Play all scenarios; return exit status 1 if a result differs from the recorded one."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    wrong = 0
    for path in scenario_files():
        text = path.read_text()
        played = play_text(text)
        if played == text:
            continue
        wrong += 1
        print(f"{path.name} {'rewritten' if update else 'differs'}")
        if update:
            path.write_text(played)
    return int(wrong > 0 and not update)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tools.prose`: exit status 1 where the prose of a folder or the subject of a commit exceeds a limit."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from .measure import excesses

ROOT = Path(__file__).parents[2]
SUBJECT_MAX = 72
# The last commit that was made before subjects had a limit.
FIRST = "d9216d6"


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where this is no checkout, or one without that much history."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def long_subjects(subjects: list[str]) -> list[str]:
    """Return the commit subjects above the limit."""
    return [subject for subject in subjects if len(subject) > SUBJECT_MAX]


def main() -> int:
    """Check every folder at the top and the subjects of new commits; print what is above a limit."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for name in _git("ls-files", "-co", "--exclude-standard", "*.py", "*.md"):
        path = ROOT / name
        if path.is_file() and "/results/" not in name:
            folders[name.partition("/")[0] if "/" in name else "."].append(path)
    problems = [
        f"{excess.folder}: {excess.kind} {excess.rate:.2f}, limit {excess.limit:g}; see `python -m tools.prose.list`"
        for folder, paths in sorted(folders.items())
        for excess in excesses(folder, paths)
    ]
    subjects = _git("log", "--no-merges", "--format=%s", f"{FIRST}..HEAD")
    problems += [f"commit subject of {len(subject)} characters: {subject}" for subject in long_subjects(subjects)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

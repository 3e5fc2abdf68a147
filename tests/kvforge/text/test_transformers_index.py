"""The index of transformers' models: the same as its own, in fewer reads of files."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

from kvforge.text.transformers_index import speed_up

PROGRAM = """
import builtins, json, sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from kvforge.text.transformers_index import quick_import

sys.modules["torch"] = None
opened = Counter()

def counting(file, *arguments, plain=builtins.open, **keywords):
    opened[str(file)] += 1
    return plain(file, *arguments, **keywords)

builtins.open = counting
with quick_import() if sys.argv[1] == "quick" else nullcontext():
    import transformers
    import transformers.models.llama.configuration_llama
assert not any("transformers_index" in type(finder).__module__ for finder in sys.meta_path)
names = transformers.utils.import_utils
index = names.define_import_structure(Path(transformers.__file__).parent / "models", prefix="models")
reads = [count for name, count in opened.items() if "/transformers/models/" in name]
flat = sorted(
    [*sorted(needs), name, *sorted(objects)] for needs, found in index.items() for name, objects in found.items()
)
print(json.dumps([Counter(reads).most_common(1)[0][0], len(reads), flat]))
"""


def index(how: str) -> tuple[int, int, list[list[str]]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    each, files, flat = json.loads(done.stdout.splitlines()[-1])
    return each, files, flat


def test_the_index_is_the_same_and_each_file_is_read_once() -> None:
    quick, plain = index("quick"), index("plain")
    assert quick[2] == plain[2]
    assert quick[0] == 1 < plain[0]  # a newer transformers reads each once: remove quick_import
    assert quick[1] == plain[1] > 1000


def test_another_versions_module_is_left_as_it_is() -> None:
    module = ModuleType("import_utils")
    vars(module)["create_import_structure_from_path"] = plain = dict
    speed_up(module)
    assert module.create_import_structure_from_path is plain and not hasattr(module, "fetch__all__")

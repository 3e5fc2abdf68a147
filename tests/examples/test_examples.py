"""Each program of examples/ runs as a process against one small service, and prints what it promises."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.served import Gateway
from tests.worker.characters import write_characters
from tools.cluster.cluster import Cluster

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
LINES_MAX = 60
# The tokenizer has a token for each printable character, and none for a line's end.
TEMPLATE = "{% for message in messages %}{{ '[' + message.role + ']' + message.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Cluster, Gateway]]:
    """Start a coordinator, a worker with random weights, and a gateway."""
    with Cluster(blocks=1024) as cluster:
        write_characters(cluster.model)
        settings = json.loads((cluster.model / "tokenizer_config.json").read_text())
        (cluster.model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
        cluster.start("w0")
        with Gateway(cluster.runtime, cluster.folder) as gateway:
            yield cluster, gateway


def run(cluster: Cluster, name: str, *arguments: str, piped: str = "") -> str:
    """Run a program to its end; return its output."""
    return python(cluster, str(REPOSITORY / "examples" / name), *arguments, piped=piped)


def python(cluster: Cluster, *arguments: str, piped: str = "") -> str:
    """Run Python with the service as its default; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=piped,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "KVFORGE_RUNTIME_DIR": str(cluster.runtime)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_chat_finds_its_conversation_in_the_cache(service: tuple[Cluster, Gateway]) -> None:
    cluster, gateway = service
    questions = "Why is the sky blue, and not green?\nAnd at night?\n"
    printed = run(cluster, "chat.py", "--url", f"{gateway.url}/v1", "--max-tokens", "24", piped=questions)
    (first, of), (later, longer) = re.findall(r"\[(\d+) of (\d+) prompt tokens were cached\]", printed)
    assert int(first) == 0
    assert 16 <= int(later) < int(longer)
    assert int(of) < int(longer)


def test_tree_search_shares_blocks_and_removes_its_sequences(service: tuple[Cluster, Gateway]) -> None:
    cluster, _ = service
    prompt = "Once upon a time there was a sequence of more than one block,"
    arguments = ("--depth", "3", "--branches", "3", "--keep", "2", "--tokens", "8")
    printed = run(cluster, "tree_search.py", prompt, *arguments)
    assert re.findall(r"round (\d): (\d+) branches", printed) == [("1", "3"), ("2", "6"), ("3", "6")]
    [(separate, used)] = re.findall(r"blocks of the kept sequences: (\d+), without sharing; (\d+) in use", printed)
    assert int(used) < int(separate)
    assert f"best: {prompt}" in printed
    with cluster.client() as kv:
        assert sum(pool.referenced for pool in kv.stats().pools) == 0
    assert run(cluster, "tree_search.py", prompt, *arguments) == printed, "seeds make it the same again"


def test_agents_call_tools_until_they_answer(service: tuple[Cluster, Gateway]) -> None:
    cluster, _ = service
    # Each answer has a seed of its own. A third of the agents answer at once: all 13 do so once in 1.6 million times.
    questions = [f"What is {number} times 23?" for number in range(13)]
    printed = run(cluster, "agent.py", *questions)
    assert [line.partition(" => ")[0] for line in printed.splitlines() if " => " in line] == questions
    calls = re.findall(r" -> (\{.*\}) = (\d+)$", printed, re.MULTILINE)
    assert calls
    for text, result in calls:
        call = ast.literal_eval(text)
        assert int(result) == (call["a"] * call["b"] if call["tool"] == "multiply" else len(call["word"]))


def test_extract_prints_a_valid_record_for_each_text(service: tuple[Cluster, Gateway]) -> None:
    cluster, _ = service
    printed = run(cluster, "extract.py", "Ada Lovelace, born in 1815.", piped="Emmy Noether, 1882.\n\nAlan Turing.\n")
    records = [json.loads(line) for line in printed.splitlines()]
    assert len(records) == 3
    for record in records:
        assert list(record) == ["name", "year", "field"]
        assert 0 <= record["year"] <= 2100 and len(record["name"]) <= 40
        assert record["field"] in ("science", "art", "politics", "other")


def test_load_test_reports_ordered_percentiles(service: tuple[Cluster, Gateway]) -> None:
    cluster, _ = service
    printed = run(cluster, "load_test.py", "--rate", "50", "--requests", "20", "--input", "16", "--output", "8")
    assert re.match(r"20 requests, [\d.]+ tokens/s\n", printed)
    found = [(float(p50), float(p99)) for p50, p99 in re.findall(r"p50 ([\d.]+) ms, p99 ([\d.]+) ms", printed)]
    assert len(found) == 2 and all(0 < p50 <= p99 for p50, p99 in found)
    assert found[0][0] <= found[1][0], "the first token comes before the last"


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md"])
def test_the_python_of_a_document_runs(service: tuple[Cluster, Gateway], document: str) -> None:
    cluster, _ = service
    programs = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / document).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert [python(cluster, "-c", program) for program in programs if program.startswith("from kvforge")]


def test_every_example_has_a_test() -> None:
    tested = re.findall(r'run\(cluster, "(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert {path.name for path in EXAMPLES} == set(tested)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_uses_the_public_api_alone(example: Path) -> None:
    """Its docstring shows how to run it."""
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_MAX
    tree = ast.parse(text)
    assert f"python examples/{example.name}" in (ast.get_docstring(tree) or "")
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert not [name for name in imported if str(name).startswith("kvforge.")]
    readme = (example.parent / "README.md").read_text(encoding="utf-8")
    assert f"]({example.name})" in readme

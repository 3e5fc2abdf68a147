"""Names of the Hugging Face Hub, with huggingface_hub itself against a hub on this machine."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvforge.models import hub as models_hub
from kvforge.models.config_checks import check_config
from kvforge.protocol.errors import UnsupportedModel
from tests.forked import Scripts
from tests.kvforge.models.fake_hub import COMMIT, OLD, FakeHub, fake_hub

pytest.importorskip("huggingface_hub")

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a whole safetensors file
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
REST = {"tokenizer.json": b"{}", "README.md": b"text", "onnx/model.onnx": b"0" * 10_000, "pytorch_model.bin": b"0" * 10}
PULL = """
import sys
from kvforge.models.store import find, pull
from kvforge.protocol.errors import KvforgeError
seen = []
try:
    path = pull(sys.argv[1], progress=lambda phase, fraction: seen.append((phase, fraction)))
    assert find(sys.argv[1]) == path, find(sys.argv[1])
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    fractions = [fraction for phase, fraction in seen if phase == "downloading"]
    assert fractions == sorted(fractions) and fractions[-1] == 1, fractions
    print(path)
except KvforgeError as error:
    print(f"{error.code}: {error}")
"""


@cache
def scripts() -> Scripts:
    """Return what runs scripts that need the packages of huggingface_hub, which itself reads its settings at import."""
    made = Scripts("httpx", "rich.console", "tqdm", "yaml", "filelock", "packaging.version")
    atexit.register(made.close)
    return made


def folder(config: dict[str, Any], **more: bytes) -> dict[str, bytes]:
    return {"config.json": json.dumps(config).encode(), "model.safetensors": NO_TENSORS, **REST, **more}


@pytest.fixture
def served() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


def pulled(hub: FakeHub, name: str, home: Path, **environment: str) -> str:
    """Return the path of `pull`, or its error, in a separate process, because the library reads its settings once."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    mine = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
    process = scripts().run(PULL, name, environment=outer | mine | environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_a_folder_is_fetched_and_only_what_it_is_made_of(served: FakeHub, tmp_path: Path) -> None:
    served.put("org/name", folder(LLAMA))
    path = Path(pulled(served, "org/name", tmp_path))
    assert {each.name for each in path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert path.name == COMMIT
    assert served.fetched() == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_revision_is_that_revision(served: FakeHub, tmp_path: Path) -> None:
    served.put("org/name", folder(LLAMA))
    served.put("org/name", folder({**LLAMA, "old": True}), OLD)
    for name in ("org/name@v1", f"org/name@{OLD}"):
        path = Path(pulled(served, name, tmp_path))
        assert json.loads((path / "config.json").read_text())["old"] is True
    assert "'v2'" in pulled(served, "org/name@v2", tmp_path)
    assert Path(pulled(served, "org/name", tmp_path)).name == COMMIT


def test_one_gguf_file_of_several(served: FakeHub, tmp_path: Path) -> None:
    header = b"GGUF" + bytes(20)  # refused as a model after the download
    files = {f"model-{kind}.gguf": header for kind in ("Q4_K_M", "Q8_0")} | {"mmproj-F16.gguf": header}
    served.put("org/gguf", files | {"config.json": json.dumps(LLAMA).encode()})
    said = pulled(served, "org/gguf", tmp_path)
    assert "holds 2 GGUF files: name one, as org/gguf:FILE (model-Q4_K_M.gguf, model-Q8_0.gguf)" in said
    assert "no GGUF file called 'Q5'" in pulled(served, "org/gguf:Q5", tmp_path)
    assert not served.fetched()
    assert "GGUF header cannot be read" in pulled(served, "org/gguf:q4_k_m", tmp_path)
    assert served.fetched() == {"model-Q4_K_M.gguf"}
    assert "GGUF header cannot be read" in pulled(served, "org/gguf@main:model-Q8_0.gguf", tmp_path)


def test_a_token_opens_what_is_private(served: FakeHub, tmp_path: Path) -> None:
    served.put("org/secret", folder(LLAMA))
    served.private["org/secret"] = "hf_mine"
    assert "HF_TOKEN" in pulled(served, "org/secret", tmp_path)
    assert Path(pulled(served, "org/secret", tmp_path, HF_TOKEN="hf_mine")).name == COMMIT


def test_gated_absent_and_unreachable_say_so(served: FakeHub, tmp_path: Path) -> None:
    served.put("org/gated", folder(LLAMA))
    served.gated.add("org/gated")
    assert "it is gated: accept its terms" in pulled(served, "org/gated", tmp_path)
    assert "no such model, or it is private" in pulled(served, "org/nothing", tmp_path)
    assert "could not be fetched from the hub" in pulled(
        served, "org/name", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_DOWNLOAD_TIMEOUT="1"
    )


def test_what_is_here_needs_no_hub(served: FakeHub, tmp_path: Path) -> None:
    served.put("org/name", folder(LLAMA))
    path = pulled(served, "org/name", tmp_path)
    script = "import sys; from kvforge.models.store import pull; print(pull(sys.argv[1]))"
    for more in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": served.url, **more}
        again = scripts().run(script, "org/name", environment=environment)
        assert again.stdout.strip() == path, again.stderr


@pytest.mark.parametrize(
    ("files", "word", "fetched"),
    [
        (folder({**LLAMA, "quantization_config": {"quant_method": "quark"}}), "quantised by quark", 1),
        (folder({**LLAMA, "quantization_config": {"quant_method": "fbgemm_fp8"}}), "quantised by FBGEMM FP8", 1),
        (folder({"model_type": "vit", "architectures": ["ViTForImageClassification"]}), "vision-only", 1),
        (folder({"model_type": "siglip", "architectures": ["SiglipModel"]}), "vision-only", 1),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": NO_TENSORS}, "holds an adapter", 0),
        (folder(LLAMA, **{"adapter_config.json": b"{}"}), "holds an adapter", 0),
        ({"config.json": b"{}", "pytorch_model.bin": b"0"}, "only pickled weights", 0),
        ({"README.md": b"text"}, "holds no model", 0),
        ({"m-00001-of-00002.gguf": b"GGUF"}, "one part of a split file", 0),
        (folder(LLAMA) | {"config.json": b"{"}, "config.json", 1),
    ],
)
def test_what_cannot_be_served_is_named_before_weights(
    files: dict[str, bytes], word: str, fetched: int, served: FakeHub, tmp_path: Path
) -> None:
    served.put("org/other", files)
    said = pulled(served, "org/other", tmp_path)
    assert word in said, said
    assert served.fetched() == ({"config.json"} if fetched else set())


def test_an_interrupted_download_is_not_found(served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its files are in the cache, but no name refers to them."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    wanted = models_hub.parse("org/name")
    assert wanted is not None
    served.put("org/name", folder(LLAMA))
    del served.files["org/name", COMMIT]["tokenizer.json"]
    served.files["org/name", COMMIT]["extra.json"] = b"{}"
    served.revisions.pop(COMMIT)  # the files are no longer available
    said = pulled(served, "org/name", tmp_path)
    assert "config.json: " in said
    assert models_hub.find(wanted) is None
    served.revisions[COMMIT] = COMMIT
    assert models_hub.find(wanted) is None
    assert Path(pulled(served, "org/name", tmp_path)) == models_hub.find(wanted)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", ("org/name", "", "")),
        ("org/name@v1.0", ("org/name", "v1.0", "")),
        ("org/name:Q4_K_M", ("org/name", "", "Q4_K_M")),
        ("org/name@refs/pr/3:sub/m.gguf", ("org/name", "refs/pr/3", "sub/m.gguf")),
        ("org/name.gguf", None),
        ("name", None),
        ("org/name@", None),
        ("a/b/c", None),
    ],
)
def test_names(name: str, parts: tuple[str, str, str] | None) -> None:
    found = models_hub.parse(name)
    assert (found and (found.repo, found.revision, found.file)) == parts


@pytest.mark.parametrize("odd", [5, "awq", ["x"], {"bits": 4}, {"quant_method": ["awq"]}, {"quant_method": 5}])
def test_odd_values_are_named(odd: Any) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        check_config({**LLAMA, "quantization_config": odd}, "m")

"""The tokenizer of a folder with a complete tokenizer.json is loaded without AutoTokenizer, and equals that one's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the text extra is not installed")

from transformers import AutoTokenizer

from kvforge.protocol.errors import UnsupportedModel
from kvforge.text import tokenizer as module
from kvforge.text.tokenizer import Tokenizer
from tests.worker.characters import write_characters

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
SAID = [{"role": "user", "content": "Hi, you"}, {"role": "assistant", "content": "</s> 1"}]


def folder_of(folder: Path, family: str = "llama", **settings: Any) -> Path:
    write_characters(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "architectures": ["LlamaForCausalLM"]}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def auto(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("template", ["tokenizer_config.json", "chat_template.jinja"])
def test_it_is_the_tokenizer_that_autotokenizer_gives(kind: str, template: str, tmp_path: Path) -> None:
    extra: dict[str, Any] = {"unk_token": "<unk>", "model_max_length": 77, "clean_up_tokenization_spaces": False}
    folder = folder_of(tmp_path, tokenizer_class=kind, additional_special_tokens=["<tool>"], **extra)
    if template == "chat_template.jinja":
        (folder / template).write_text(TEMPLATE)
    else:
        folder_of(folder, tokenizer_class=kind, additional_special_tokens=["<tool>"], chat_template=TEMPLATE, **extra)
    assert module._is_whole(folder)
    found, wanted = Tokenizer.load(folder)._tokenizer, auto(folder)
    assert type(found) is type(wanted)
    assert found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    for name in ("chat_template", "special_tokens_map", "all_special_ids", "model_max_length", "padding_side"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.chat_template == TEMPLATE and "<tool>" in found.get_vocab()
    for text in ("Hi, you", "<s>a <tool>b</s>", " 1  2"):
        assert found(text)["input_ids"] == wanted(text)["input_ids"]
    assert found.apply_chat_template(SAID, tokenize=False) == wanted.apply_chat_template(SAID, tokenize=False)


def test_a_client_of_it_loads_no_torch(tmp_path: Path) -> None:
    """Where torch is installed, AutoTokenizer imports it: three seconds of processor time."""
    program = (
        "import sys\n"
        "from kvforge.text.tokenizer import Tokenizer\n"
        "print(len(Tokenizer.load(sys.argv[1]).encode('abc')), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(folder_of(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("3 False\n", "")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {}),
        ("mistral", {}),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}),
    ],
)
def test_what_the_family_may_change_is_left_to_autotokenizer(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert not module._is_whole(folder_of(tmp_path, family, **settings))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_damaged_file_is_left_to_autotokenizer(name: str, content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_bytes(content)
    assert not module._is_whole(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_folder_without_one_of_its_files_is_left_to_autotokenizer(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / name).unlink()
    assert not module._is_whole(folder)


def test_a_folder_without_a_tokenizer_is_refused_before_transformers_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway serves token ids alone, and its text helper starts without that import."""
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match="the folder holds no tokenizer"):
        Tokenizer.load(folder)

"""Memory of transformers and of a GGUF file's header that remains after a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvforge.worker.device.device import Device, built_for_gpus
from kvforge.worker.loading import find_source, gguf_read_once, lazy_compiler, read_config
from kvforge.worker.loading.lazy_compiler import LEAVES_OUT
from kvforge.worker.loading.model import LoadedModel
from tests.forked import Scripts
from tests.worker.loading.gguf_files import write_gguf

UNUSED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "scipy.optimize", "sklearn")
UNUSED += () if built_for_gpus() else ("triton",)

leaves_out = pytest.mark.skipif(not LEAVES_OUT, reason="this transformers was not tried with a torch for GPUs")


def runner(scripts: Scripts) -> Callable[[str], str]:
    """Return a function of code that returns the last line that the code prints."""

    def run(code: str) -> str:
        done = scripts.run(code)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], str]]:
    """run(code) -> the last line that the code prints in a process that has imported torch alone."""
    with Scripts("torch") as scripts:
        yield runner(scripts)


@pytest.fixture(scope="module")
def run_behind() -> Iterator[Callable[[str], str]]:
    """The same in a process that has imported torch and then the module, and with it transformers."""
    with Scripts("torch", lazy_compiler.__name__) as scripts:
        yield runner(scripts)


@leaves_out
def test_a_load_imports_no_compiler_and_leaves_it_as_it_was(
    tiny: Callable[..., LoadedModel], tmp_path: Path, run_behind: Callable[[str], str]
) -> None:
    folder = tmp_path / "saved"
    tiny("llama").module.save_pretrained(folder)
    code = f"""
import sys
from kvforge.worker.device.device import open_device
from kvforge.worker.loading.load import load_model
import torch

load_model({str(folder)!r}, device=open_device("cpu"), block_size=4)
found = [name for name in {UNUSED!r} if name in sys.modules]
compiled = torch.compile(lambda x: x + 1, backend="eager")
answers = compiled(torch.ones(2)).tolist(), torch.distributed.is_available(), torch._dynamo.is_compiling()
from transformers.loss import loss_for_object_detection as losses
from scipy.optimize import linear_sum_assignment
same = [function([[1, 0], [0, 1]])[1].tolist() for function in (losses.linear_sum_assignment, linear_sum_assignment)]
print(found, *answers, same, losses.linear_sum_assignment is not linear_sum_assignment)
"""
    assert run_behind(code) == "[] [2.0, 2.0] True False [[1, 0], [1, 0]] True"


@leaves_out
def test_who_asks_for_more_of_the_compiler_gets_the_real_one(run_behind: Callable[[str], str]) -> None:
    code = """
import sys
from kvforge.worker.loading.lazy_compiler import less_of_torch
import torch

def f(): pass
with less_of_torch():
    import torch._dynamo as compiler
    same = [compiler.disable(f) is f, compiler.allow_in_graph(f) is f, compiler.disable(recursive=False)(f) is f]
    stood_in = not hasattr(compiler, "__file__")
    compiling = compiler.is_compiling()
print(same, stood_in, compiling, sys.modules["torch._dynamo"].__file__ is not None)
"""
    assert run_behind(code) == "[True, True, True] True False True"


@leaves_out
def test_a_part_of_the_compiler_comes_with_the_whole(run_behind: Callable[[str], str]) -> None:
    """A part was imported into the stand-in and imported the whole itself, which found it half made."""
    code = """
import sys
from kvforge.worker.loading.lazy_compiler import less_of_torch
import torch

with less_of_torch():
    from torch._dynamo.utils import is_compile_supported
    import torch._dynamo as compiler
utils = compiler.utils
found = utils is sys.modules["torch._dynamo.utils"], utils.is_compile_supported is is_compile_supported
print(*found, utils.__spec__.loader.__class__.__name__, torch.compile(abs, backend="eager")(-1))
"""
    assert run_behind(code) == "True True SourceFileLoader 1"


@leaves_out
def test_torchvision_and_boto3_are_not_imported_with_transformers(tmp_path: Path, run: Callable[[str], str]) -> None:
    """transformers imports torchvision where it is installed, and torchvision imported parts of the compiler.
    accelerate imports boto3."""
    (tmp_path / "boto3").mkdir()
    (tmp_path / "boto3" / "__init__.py").touch()
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("from torch._dynamo.utils import is_compile_supported\n")
    (tmp_path / "torchvision-0.26.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.26.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.26.0\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import kvforge.worker.loading.lazy_compiler
from transformers.loss import loss_utils
before = [name in sys.modules for name in ("torchvision", "torch._dynamo", "accelerate", "boto3")]
import boto3, torchvision
print(*before, torchvision.is_compile_supported.__name__, boto3.__file__ is not None)
"""
    assert run(code) == "False False True False is_compile_supported True"


@leaves_out
def test_who_asks_about_symbols_gets_the_real_answers(run_behind: Callable[[str], str]) -> None:
    code = """
import sys
from kvforge.worker.loading.lazy_compiler import less_of_torch
import torch

with less_of_torch():
    from torch.fx.experimental.symbolic_shapes import guard_or_false, is_nested_int, sym_eq, sym_or
    import sympy as symbols
    plain = [guard_or_false(True), guard_or_false(False), is_nested_int(3), sym_or(False, True)]
    plain += [sym_eq((2, 3), (2, 3)), sym_eq((2, 3), (2,)), isinstance(1, symbols.Basic)]
    brought = "sympy.core" in sys.modules

from torch.fx.experimental.symbolic_shapes import ShapeEnv
size = ShapeEnv().create_unbacked_symint()
answers = guard_or_false(size == 5), guard_or_false(size == size), type(sym_or(size == 5, size == 6)).__name__
print(plain, brought, isinstance(size.node.expr, symbols.Basic), *answers)
"""
    assert run_behind(code) == "[True, False, False, True, True, False, False] False True False True SymBool"


@leaves_out
def test_after_an_error_transformers_is_imported_again(run_behind: Callable[[str], str]) -> None:
    code = """
import sys
from kvforge.worker.loading import lazy_compiler
from kvforge.worker.loading.lazy_compiler import StandIn

for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
found = []

def importing():
    found.append((isinstance(sys.modules.get("torch._dynamo"), StandIn), "transformers.half" in sys.modules))
    sys.modules["transformers.half"] = sys
    if len(found) == 1:
        raise AttributeError("no such part")

lazy_compiler._import_all = importing
lazy_compiler.import_transformers()
print(found)
"""
    assert run_behind(code) == "[(True, False), (False, False)]"


@leaves_out
def test_a_version_that_needs_all_of_torch_gets_it(run: Callable[[str], str]) -> None:
    code = """
import importlib, sys

kept, refused = importlib.import_module, []

def refusing(name, package=None):
    compiler = sys.modules.get("torch._dynamo")
    if name == "transformers.modeling_rope_utils" and compiler and not hasattr(compiler, "__file__"):
        refused.append(name)
        raise AttributeError("no such part")
    return kept(name, package)

importlib.import_module = refusing
import kvforge.worker.loading.load
import transformers
print(refused, transformers.AttentionInterface.__name__, hasattr(sys.modules["torch._dynamo"], "__file__"))
"""
    assert run(code) == "['transformers.modeling_rope_utils'] AttentionInterface True"


def test_of_a_vocabulary_only_the_size_is_read(tiny: Callable[..., LoadedModel], tmp_path: Path, cpu: Device) -> None:
    path = write_gguf(tiny("llama").module, tmp_path / "tiny.gguf", metadata={"vocab_size": None})
    plain = gguf.GGUFReader(path)
    with gguf_read_once():
        reader = gguf.GGUFReader(path)
        assert read_config(find_source(path, "auto")).vocab_size == 97
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.parts) < 10 and tokens.contents() == [""] * 97
    assert list(reader.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        if name != "tokenizer.ggml.tokens":
            assert reader.fields[name].contents() == field.contents(), name
    for one, other in zip(reader.tensors, plain.tensors, strict=True):
        assert one.name == other.name and np.array_equal(one.data, other.data)


@pytest.mark.parametrize(("version", "whole"), [("5.17.0", False), ("5.24.1", False), ("5.16.9", True), ("6.0", True)])
def test_which_versions_are_tried(version: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_compiler, "built_for_gpus", lambda: True)
    monkeypatch.setattr(lazy_compiler.metadata, "version", lambda _: version)
    assert lazy_compiler._leaves_out() == (not whole)


@pytest.mark.parametrize(
    ("version", "whole"), [("5.24.1", False), pytest.param("5.16.9", True, marks=pytest.mark.soak)]
)
def test_with_a_build_for_gpus_only_versions_that_were_tried_get_less(
    version: str, whole: bool, run: Callable[[str], str]
) -> None:
    """A transformers version that used the compiler beyond its decorators did not start, half imported.

    `test_which_versions_are_tried` and `test_with_all_of_torch_nothing_stands_in` have the parts of the soak test.
    """
    code = f"""
import torch
torch.version.cuda = "13.0"
import sys
from importlib import metadata
kept = metadata.version
metadata.version = lambda name: {version!r} if name == "transformers" else kept(name)
from kvforge.worker.loading import lazy_compiler

metadata.version = kept
print(lazy_compiler.LEAVES_OUT, getattr(sys.modules.get("torch._dynamo"), "__file__", None) is not None)
"""
    assert run(code) == f"{not whole} {whole}"


@leaves_out
def test_with_all_of_torch_nothing_stands_in(run_behind: Callable[[str], str]) -> None:
    code = """
import sys
from kvforge.worker.loading import lazy_compiler

lazy_compiler.LEAVES_OUT = False
with lazy_compiler.less_of_torch():
    without = [name in sys.modules for name in ("torch._dynamo", "sympy", "boto3")]
lazy_compiler.LEAVES_OUT = True
with lazy_compiler.less_of_torch():
    print(without, [name in sys.modules for name in ("torch._dynamo", "sympy", "boto3")])
"""
    assert run_behind(code) == "[False, False, False] [True, True, True]"


@leaves_out
@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_metric_of_scikit_learn_is_imported_by_its_first_use(
    is_real: bool, tmp_path: Path, run_behind: Callable[[str], str]
) -> None:
    """Importing the real one takes 2 s."""
    if is_real:
        pytest.importorskip("sklearn")
    else:
        (tmp_path / "sklearn").mkdir()
        (tmp_path / "sklearn" / "__init__.py").touch()
        (tmp_path / "sklearn" / "metrics.py").write_text("def roc_curve(*given): return (*given, 1)\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from kvforge.worker.loading.lazy_compiler import less_of_torch
with less_of_torch():
    from sklearn.metrics import roc_curve
before = "sklearn" in sys.modules
found = roc_curve([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
print(before, len(found), "sklearn" in sys.modules)
"""
    assert run_behind(code) == "False 3 True"

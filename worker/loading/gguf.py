"""The tensors of a GGUF file: which of them went into the model, and what each is called on either side."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import modeling_gguf_pytorch_utils

from kvforge.models.gguf_header import GgufHeader

from .report import LoadReport, judge

# All experts of a layer in one tensor; transformers keeps the name without its ending.
EXPERTS = re.compile(r"(?P<name>.*\.ffn_(gate|up|down)_exps)\.weight")
# What turns into frequencies of the rotary embedding (see `rope`).
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
HEAD = "output.weight"


@dataclass
class GgufNames:
    """stored: a tensor's name in the file -> its name in the model. Empty where transformers made no such table."""

    stored: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """The name in the file of a model's tensor; where there are several, all of them."""
        found = sorted(stored for stored, wanted in self.stored.items() if wanted == name)
        whole = [f"{stored}.weight" if EXPERTS.fullmatch(f"{stored}.weight") else stored for stored in found]
        return " and ".join(whole) or name

    def complete(self, report: LoadReport, header: GgufHeader) -> None:
        """Puts into the report what transformers leaves out of it: it looks up each tensor of the file in its table,
        forgets those that are not there, and fills what half of a pair does not come for with zeros."""
        if not self.stored:
            return
        names = {tensor.name for tensor in header.tensors}
        known = set(self.stored)
        if header.metadata["general.architecture"] == "gpt2":
            known.add(HEAD)
        report.unused |= {name for name in names - known if not self._is_expert(name)} - set(ROPE_TENSORS)
        for stored in self.stored:
            whole = f"{stored}.weight"
            if EXPERTS.fullmatch(whole) and whole not in names:
                report.missing.add(whole)

    def absent(self, module: Any, header: GgufHeader) -> set[str]:
        """Return the model's tensors that the file lacks, but for experts: see `complete`.

        Args:
            module: The model that they belong to; the meta device is enough.
            header: The header of the file.
        """
        names = {tensor.name for tensor in header.tensors}
        found = {wanted for stored, wanted in self.stored.items() if stored in names or f"{stored}.weight" in names}
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_missing or ()]
        wanted = {wanted for stored, wanted in self.stored.items() if not EXPERTS.fullmatch(f"{stored}.weight")}
        lacking = wanted & set(module.state_dict()) - found - set(tied)
        return {name for name in lacking if not any(pattern.search(name) for pattern in ignored)}

    def _is_expert(self, name: str) -> bool:
        match = EXPERTS.fullmatch(name)
        return match is not None and match["name"] in self.stored


@contextlib.contextmanager
def noted_names(header: GgufHeader | None, model: str) -> Iterator[GgufNames]:
    """Note the table of names that transformers makes for itself while it loads a GGUF file.

    Args:
        header: The header of the file; None: no file. A missing tensor is refused before any is read.
        model: The name in a refusal.

    Raises:
        UnsupportedModel: Where tensors are missing.
    """
    names = GgufNames()
    make = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map

    def note(module: Any, *arguments: Any, **keywords: Any) -> dict[str, str]:
        names.stored = make(module, *arguments, **keywords)  # it calls itself for each part, which has a name
        if header is not None and not keywords.get("qual_name"):
            report = LoadReport(missing=names.absent(module, header))
            names.complete(report, header)
            if report.missing:
                judge(report, model, names.of)
        return names.stored

    modeling_gguf_pytorch_utils.get_gguf_hf_weights_map = note
    try:
        yield names
    finally:
        modeling_gguf_pytorch_utils.get_gguf_hf_weights_map = make

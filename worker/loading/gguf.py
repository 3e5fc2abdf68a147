"""Tensors of a GGUF file: which ones went into the model, and their names on both sides."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import modeling_gguf_pytorch_utils

from kvforge.models.gguf_header import GgufHeader

from .report import LoadReport, reject_mismatches

# One tensor holds all experts of a layer; transformers keeps its name without the suffix.
EXPERTS = re.compile(r"(?P<name>.*\.ffn_(gate|up|down)_exps)\.weight")
# Tensors that become frequencies of the rotary embedding (see `rope`).
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
HEAD = "output.weight"


@dataclass
class GgufNames:
    """Names of a file's tensors. stored: name in the file -> name in the model; empty without a table."""

    stored: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """Return the file's names of a model's tensor, joined if there are several."""
        found = sorted(stored for stored, wanted in self.stored.items() if wanted == name)
        whole = [f"{stored}.weight" if EXPERTS.fullmatch(f"{stored}.weight") else stored for stored in found]
        return " and ".join(whole) or name

    def complete(self, report: LoadReport, header: GgufHeader) -> None:
        """Add to the report what transformers leaves out.

        transformers looks up each tensor of the file in its table, ignores those without an entry, and fills the
        missing half of a pair with zeros.
        """
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
        """Return the model's tensors that the file lacks, except for experts (see `complete`).

        Args:
            module: The model, possibly on the meta device.
            header: The header of the file.

        Returns:
            Names in the model.
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
    """Record the table of names that transformers builds while it loads a GGUF file.

    Args:
        header: The header of the file, to reject missing tensors before any is read; None without a file.
        model: The name for errors.

    Yields:
        The names, filled during the load.

    Raises:
        UnsupportedModel: Tensors are missing.
    """
    names = GgufNames()
    make = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map

    def note(module: Any, *arguments: Any, **keywords: Any) -> dict[str, str]:
        names.stored = make(module, *arguments, **keywords)  # it recurses into named parts
        if header is not None and not keywords.get("qual_name"):
            report = LoadReport(missing=names.absent(module, header))
            names.complete(report, header)
            if report.missing:
                reject_mismatches(report, model, names.of)
        return names.stored

    modeling_gguf_pytorch_utils.get_gguf_hf_weights_map = note
    try:
        yield names
    finally:
        modeling_gguf_pytorch_utils.get_gguf_hf_weights_map = make

"""The rotary embedding of a GGUF file. transformers reads only its base.

It is read as in llama.cpp (llama-model.cpp, llama-graph.cpp, ggml's rope_yarn), passed to transformers in its own
parameters, and compared with the resulting frequencies. A parameter that cannot be expressed, or has no effect, is
rejected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.models.gguf_header import GgufHeader, GgufTensor
from kvforge.protocol.errors import UnsupportedModel

from .rope import DIVIDED

Floats = np.ndarray[Any, np.dtype[np.float64]]
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Keys under "ARCHITECTURE.rope." that this module reads or that other modules cover.
KEYS = frozenset(
    {
        "dimension_count",
        "freq_base",
        "freq_base_swa",
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.attn_factor",
        "scaling.original_context_length",
        "scaling.finetuned",
        "scaling.yarn_ext_factor",
        "scaling.yarn_attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
        "scaling.yarn_log_multiplier",
    }
)
LOCAL_BASE = 10_000.0  # for the sliding layers of Gemma 3; GGUF files do not contain it
EXACT = 1e-5  # relative; transformers computes in float32


@dataclass(frozen=True)
class GgufRope:
    """A rotary embedding.

    Attributes:
        kind: default, linear, yarn, longrope or divided.
        base: Base of the frequencies.
        local_base: Base in sliding layers.
        dimensions: Rotated dimensions of a head.
        factor: Scaling factor.
        magnitude: Factor of cos and sin.
        original: Positions before the context was extended.
        beta_fast: YaRN's upper bound of turns.
        beta_slow: YaRN's lower bound of turns.
        divisors: [dimensions / 2], divisor of each frequency; for longrope up to `original` positions.
        long: The divisors of longrope beyond `original` positions.
    """

    kind: str
    base: float
    local_base: float
    dimensions: int
    factor: float = 1.0
    magnitude: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    divisors: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def read(cls, header: GgufHeader, path: Path, model: str, head_size: int) -> GgufRope:
        """Read the rotary embedding of a file.

        Args:
            header: The file's header.
            path: The file.
            model: The name for errors.
            head_size: Size of a head.

        Returns:
            The rotary embedding.

        Raises:
            UnsupportedModel: Names the key or tensor that cannot be applied.
        """
        prefix = f"{header.metadata['general.architecture']}.rope."
        keys = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        if unknown := sorted(set(keys) - KEYS):
            raise UnsupportedModel(model, f"its {prefix}{unknown[0]} = {keys[unknown[0]]!r} cannot be applied")
        tensors = {t.name: t for t in header.tensors if t.name in (FREQUENCIES, LONG, SHORT)}
        divisors = {name: _numbers(tensor, path, model) for name, tensor in tensors.items()}
        plain = cls(
            "default",
            base=float(keys.get("freq_base", 10_000.0)),
            local_base=float(keys.get("freq_base_swa", LOCAL_BASE)),
            dimensions=int(keys.get("dimension_count", head_size)),
        )
        context = int(header.metadata.get(prefix.replace(".rope.", ".context_length"), 0))
        return plain._scaled(keys, divisors, context, model)

    def _scaled(
        self, keys: dict[str, Any], divisors: dict[str, tuple[float, ...]], context: int, model: str
    ) -> GgufRope:
        kind = str(keys.get("scaling.type", "linear" if "scaling.factor" in keys or "scale_linear" in keys else "none"))
        factor = float(keys.get("scaling.factor") or keys.get("scale_linear") or 1.0)
        magnitude = float(keys.get("scaling.attn_factor", 1.0)) * float(keys.get("scaling.yarn_attn_factor", 1.0))
        original = int(keys.get("scaling.original_context_length") or context)
        for key, value in (("scaling.yarn_ext_factor", 1.0), ("scaling.yarn_log_multiplier", 0.0)):
            # 0.1 * mscale_all_dim of DeepSeek; its attention is not supported.
            if float(keys.get(key, value)) != value and kind == "yarn":
                raise UnsupportedModel(model, f"its rope.{key} = {keys[key]} cannot be applied")
        changed: dict[str, Any] = {"factor": factor, "magnitude": magnitude, "original": original}
        if divisors:
            return self._divided(kind, divisors, changed, model)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            if magnitude != 1.0:
                raise UnsupportedModel(model, f"its rope.scaling.attn_factor = {magnitude:g} without a scaling")
            return self
        if kind == "linear" and magnitude == 1.0 and factor > 0:
            return self._with(kind="linear", factor=factor)
        if kind == "yarn" and factor >= 1.0 and original > 0:
            changed["magnitude"] = magnitude * (1.0 + 0.1 * math.log(factor))
            fast, slow = keys.get("scaling.yarn_beta_fast", 32.0), keys.get("scaling.yarn_beta_slow", 1.0)
            return self._with(kind="yarn", beta_fast=float(fast), beta_slow=float(slow), **changed)
        problem = f"its rope.scaling (type {kind!r}, factor {factor:g}, attn_factor {magnitude:g}) cannot be applied"
        raise UnsupportedModel(model, problem)

    def _divided(
        self, kind: str, divisors: dict[str, tuple[float, ...]], changed: dict[str, Any], model: str
    ) -> GgufRope:
        for name, values in divisors.items():
            if len(values) != self.dimensions // 2 or not all(math.isfinite(each) and each > 0 for each in values):
                raise UnsupportedModel(model, f"its tensor {name} is not {self.dimensions // 2} positive numbers")
        if set(divisors) == {LONG, SHORT} and kind in ("none", "longrope", "linear") and changed["original"] > 0:
            if kind != "linear" or changed["factor"] == 1.0:
                return self._with(kind="longrope", divisors=divisors[SHORT], long=divisors[LONG], **changed)
        elif set(divisors) == {FREQUENCIES} and kind in ("none", "linear"):
            factor = changed["factor"] if kind == "linear" else 1.0
            values = tuple(each * factor for each in divisors[FREQUENCIES])
            return self._with(kind="divided", divisors=values, magnitude=changed["magnitude"])
        named = " and ".join(sorted(divisors))
        raise UnsupportedModel(model, f"its {named} with rope.scaling.type {kind!r} cannot be applied")

    def _with(self, **changed: Any) -> GgufRope:
        return GgufRope(**{**vars(self), **changed})

    def frequencies(self) -> Floats:
        """Return the expected frequencies up to `original` positions: [dimensions / 2], radians per position."""
        half = self.dimensions // 2
        plain = self.base ** -(np.arange(half) / half)
        if self.divisors:
            return np.asarray(plain / np.array(self.divisors))
        if self.kind == "linear":
            return np.asarray(plain / self.factor)
        if self.kind != "yarn":
            return np.asarray(plain)

        def turning(turns: float) -> float:
            """Return the dimension with this many turns within `original` positions."""
            return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(self.base)

        low = max(0.0, math.floor(turning(self.beta_fast)))
        high = min(self.dimensions - 1.0, math.ceil(turning(self.beta_slow)))
        kept = 1.0 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
        return np.asarray(plain / self.factor * (1.0 - kept) + plain * kept)

    def apply(self, config: Any, head_size: int) -> None:
        """Write the embedding into transformers' configuration. Gemma 3's sliding layers stay unscaled."""
        ours: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.base}
        if self.dimensions != head_size or hasattr(config, "partial_rotary_factor"):
            ours["partial_rotary_factor"] = self.dimensions / head_size
        if self.kind in ("linear", "yarn"):
            ours["factor"] = self.factor
        if self.kind in ("yarn", "longrope"):
            ours |= {"attention_factor": self.magnitude, "original_max_position_embeddings": self.original}
        if self.kind == "yarn":
            ours |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        elif self.kind == "longrope":
            ours |= {"short_factor": list(self.divisors), "long_factor": list(self.long)}
            config.original_max_position_embeddings = self.original
        elif self.kind == "divided":
            ours |= {"rope_type": DIVIDED, "divisors": list(self.divisors), "attention_factor": self.magnitude}
        if "full_attention" in config.rope_parameters:
            local = {"rope_type": "default", "rope_theta": self.local_base}
            config.rope_parameters = {**config.rope_parameters, "full_attention": ours, "sliding_attention": local}
        else:
            config.rope_parameters = ours

    def check(self, module: Any, model: str) -> None:
        """Check that the model's frequencies match the file.

        Raises:
            UnsupportedModel: They differ.
        """
        local = self.local_base ** -(np.arange(self.dimensions // 2) / (self.dimensions // 2))
        found = 0
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                prefix, is_one, _ = name.partition("inv_freq")
                if not is_one or "original" in name:
                    continue
                found += 1
                is_local = prefix == "sliding_attention_"
                wanted, magnitude = (local, 1.0) if is_local else (self.frequencies(), self.magnitude)
                got = buffer.detach().double().cpu().numpy()
                scaling = float(getattr(part, f"{prefix}attention_scaling", 1.0))
                same = got.shape == wanted.shape and np.allclose(got, wanted, rtol=EXACT, atol=0.0)
                if not same or not math.isclose(scaling, magnitude, rel_tol=EXACT):
                    problem = f"its rotary embedding as the GGUF file has it ({self.kind}, base {self.base:g}, "
                    problem += f"{self.dimensions} dimensions, factor {self.factor:g}) cannot be applied"
                    raise UnsupportedModel(model, problem)
        if not found:
            raise UnsupportedModel(model, "its GGUF file describes a rotary embedding, and it has none")


def _numbers(tensor: GgufTensor, path: Path, model: str) -> tuple[float, ...]:
    if tensor.type_name not in ("F32", "F16"):
        raise UnsupportedModel(model, f"its tensor {tensor.name} is stored as {tensor.type_name}")
    with path.open("rb") as file:
        file.seek(tensor.start)
        values = np.frombuffer(file.read(tensor.size), "<f4" if tensor.type_name == "F32" else "<f2")
    return tuple(values.astype(np.float64).tolist())

"""Accuracy of quantised formats: how far a model's next tokens are from those of its numbers in float32.

    python -m benchmarks.format_accuracy [--model PATH] [--text-tokens 256] [--only int4,nvfp4] [--json FILE]

Every projection of the decoder layers is rounded to a format as its makers' simplest tools do, without calibration: to
the nearest code, with scales from the largest number of a group. The embedding, a tied head and activations stay in
float32, so that a difference is that of the weights alone. The reference has the numbers of the model's files: of a
quantised file, the dequantised ones.

Measured over all tokens of two texts of this repository (LICENSE, ARCHITECTURE.md): the Kullback-Leibler divergence
from the reference's distribution of the next token (nats; mean and the worst token), how often the likeliest token is
the same, and perplexity. "bits" are those of a number with its scales, as a file stores them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gguf
import torch

from benchmarks.cpu_steps import default_model
from benchmarks.cpu_weights import TEXTS, accuracy
from benchmarks.report import report
from kvforge.worker.kernels.code_tables import E2M1, IQ4, NF4
from kvforge.worker.kernels.stored import quantise_codes

Rounding = Callable[[torch.Tensor], torch.Tensor]
PROJECTION = "_proj.weight"
SCALES_TRIED = 5  # of IQ4_NL, which has no rule


def in_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return [n, groups, group], of smaller groups where these do not divide a row."""
    while weight.shape[1] % group:
        group //= 2
    return weight.view(len(weight), -1, group)


def of_rows(code: str) -> Rounding:
    """Return the rounding that `weight_dtype` makes."""
    return lambda weight: quantise_codes(weight, code).widened()


def fp8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with a scale for each block of 128 x 128."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
    rows, columns = padded.shape
    tiles = padded.view(rows // 128, 128, columns // 128, 128)
    scales = tiles.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / 448
    numbers = (tiles / scales).to(torch.float8_e4m3fn).float() * scales
    return numbers.view(rows, columns)[:n, :k].contiguous()


def fp8_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def int4_zeros(group: int) -> Rounding:
    """Return the rounding to 4 bits with a float16 scale and a zero for each group, as AWQ and GPTQ store them."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        parts = in_groups(weight, group)
        low, high = parts.amin(2, keepdim=True).clamp_max(0), parts.amax(2, keepdim=True).clamp_min(0)
        scales = ((high - low) / 15).clamp_min(1e-7).half().float()
        zeros = (-low / scales).round()
        return (((parts / scales + zeros).round().clamp(0, 15) - zeros) * scales).flatten(1)

    return rounded


def nearest(parts: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    """Return the nearest numbers of a table."""
    numbers = torch.tensor(sorted(table))
    middles = (numbers[1:] + numbers[:-1]) / 2
    return numbers[torch.bucketize(parts.contiguous(), middles)]


SIGNED_E2M1 = (*E2M1, *(-each for each in E2M1))


def mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Round to 4-bit floats with a power of 2 for each 32."""
    parts = in_groups(weight, 32)
    scales = torch.exp2((parts.abs().amax(2, keepdim=True).clamp_min(1e-12)).log2().floor() - 2)
    return (nearest(parts / scales, SIGNED_E2M1) * scales).flatten(1)


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """Round to 4-bit floats with an e4m3 scale for each 16 and one of the whole."""
    parts = in_groups(weight, 16)
    whole = weight.abs().max() / (6 * 448)
    scales = (parts.abs().amax(2, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    return (nearest(parts / scales.clamp_min(1e-12), SIGNED_E2M1) * scales).flatten(1)


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Round to quantiles with a scale for each 64."""
    parts = in_groups(weight, 64)
    scales = parts.abs().amax(2, keepdim=True).clamp_min(1e-12)
    return (nearest(parts / scales, NF4) * scales).flatten(1)


def iq4_nl(weight: torch.Tensor) -> torch.Tensor:
    """Round to IQ4_NL, for each 32 with the best of some scales around the one of the largest number."""
    parts = in_groups(weight, 32)
    extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    best, least = parts, torch.full_like(extreme, torch.inf)
    for part in torch.linspace(0.75, 1.25, SCALES_TRIED):
        scales = (extreme / IQ4[0] * part).half().float()
        found = nearest(parts / torch.where(scales == 0, 1e-12, scales), IQ4) * scales
        error = (found - parts).square().sum(2, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best.flatten(1)


def of_gguf(name: str) -> Rounding:
    """Return the rounding of llama.cpp's reference quantiser."""
    kind = gguf.GGMLQuantizationType[name]
    return lambda weight: torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind).copy())


# Name, bits of a number, rounding.
FORMATS: tuple[tuple[str, float, Rounding], ...] = (
    ("bfloat16", 16, lambda weight: weight.bfloat16().float()),
    ("fp8, by row", 8, of_rows("e4m3")),
    ("fp8, blocks of 128 x 128", 8, fp8_blocks),
    ("fp8, by tensor", 8, fp8_tensor),
    ("int8, by row", 8, of_rows("int8")),
    ("GGUF Q8_0", 8.5, of_gguf("Q8_0")),
    ("GGUF Q5_1", 6, of_gguf("Q5_1")),
    ("GGUF Q5_0", 5.5, of_gguf("Q5_0")),
    ("GGUF Q4_1", 5, of_gguf("Q4_1")),
    ("GGUF Q4_0", 4.5, of_gguf("Q4_0")),
    ("GGUF IQ4_NL", 4.5, iq4_nl),
    ("int4 with zeros, groups of 32", 4.6, int4_zeros(32)),
    ("int4 with zeros, groups of 64", 4.3, int4_zeros(64)),
    ("int4, weight_dtype (groups of 64 here)", 4.5, of_rows("int4")),
    ("nvfp4", 4.5, nvfp4),
    ("NF4, blocks of 64", 4.5, nf4),
    ("mxfp4", 4.25, mxfp4),
)


@torch.inference_mode()
def main() -> None:
    """Measures and prints."""
    from transformers import AutoModelForCausalLM

    from kvforge.text.tokenizer import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file or folder (default: smollm2-135m from the cache folder)")
    parser.add_argument("--text-tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--only", default="", help="formats with one of these texts, divided by commas, in their names")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    arguments = parser.parse_args()
    source = Path(arguments.model or default_model())
    is_file = source.is_file()
    keywords = {"gguf_file": source.name} if is_file else {}
    model = AutoModelForCausalLM.from_pretrained(source.parent if is_file else source, dtype=torch.float32, **keywords)
    model.eval()
    tokenizer = Tokenizer.load(source)
    texts = [tokenizer.encode(Path(name).read_text(encoding="utf-8"))[: arguments.text_tokens] for name in TEXTS]

    def logits() -> list[torch.Tensor]:
        return [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]

    parameters = {name: each for name, each in model.named_parameters() if name.endswith(PROJECTION)}
    kept = {name: each.detach().clone() for name, each in parameters.items()}
    exact, rows, results = logits(), [], []
    chosen = [each for each in FORMATS if any(text in each[0] for text in arguments.only.split(","))]
    for name, bits, rounded in (("as stored", 0.0, torch.clone), *chosen):
        error, size = 0.0, 0.0
        for path, parameter in parameters.items():
            numbers = rounded(kept[path])
            parameter.copy_(numbers)
            error += float((numbers - kept[path]).square().sum())
            size += float(kept[path].square().sum())
        good = accuracy(exact, logits(), texts)
        results.append({"format": name, "bits": bits, "weight_error": (error / size) ** 0.5, **good})
        rows.append(
            [
                name,
                f"{bits:g}" if bits else "-",
                f"{100 * (error / size) ** 0.5:.2f}",
                f"{good['divergence_mean']:.1e} ({good['divergence_max']:.1e})",
                f"{100 * good['same_token']:.1f}",
                f"{good['perplexity']:.2f}",
            ]
        )
        print(*rows[-1], flush=True)
    header = ["format", "bits", "error of weights %", "KL mean (max)", "same token %", "perplexity"]
    title = f"{source.name}, {sum(map(len, texts))} tokens, projections rounded to a format"
    report(title, header, rows, {"model": source.name, "measured": results}, arguments.json)


if __name__ == "__main__":
    main()

"""Peak of memory while a quantised folder is loaded, beside the folder's bytes.

    python -m benchmarks.load_peak [--formats fp8,awq,nvfp4,nf4] [--layers 24] [--device auto] [--json FILE]

For each format a separate process writes a folder of random weights in a Llama's shape, with a small vocabulary, and
another one of a single layer. It loads the latter twice, first so that libraries and compiled kernels are in memory,
and then the former. On a GPU the peak is that of torch's allocator; on a CPU, with `weight_dtype = "auto"`, that of
anonymous memory, read each 5 ms: pages of the mapped files can be dropped at any time. The checks of kernels take some
memory for any model; "peak for a byte" is what the peak of the large folder has more than the small one's, beside the
difference of their bytes. The aim is 1.15, without a pool. "after" is what stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file

from benchmarks.report import report
from kvforge.worker.device.device import Device, open_device

AIM = 1.15
HIDDEN, INNER, VOCABULARY = 1024, 2816, 1024
INTERVAL_S = 0.005
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def projection(kind: str, name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a projection [n, k] of random numbers in a format."""

    def octets(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8)

    path = name.removesuffix(".weight")
    if kind == "fp8":
        codes = (octets(n, k) & 0xBF).view(torch.float8_e4m3fn)  # below 2
        return {name: codes, f"{name}_scale_inv": torch.full((-(-n // 128), -(-k // 128)), 0.02)}
    if kind == "awq":
        words = [octets(*shape).view(torch.int32) for shape in ((k, n // 2), (k // 128, n // 2))]
        scales = torch.full((k // 128, n), 2e-3, dtype=torch.float16)
        return {f"{path}.qweight": words[0], f"{path}.qzeros": words[1], f"{path}.scales": scales}
    if kind == "nvfp4":
        scales = torch.ones((n, k // 16)).to(torch.float8_e4m3fn)
        return {name: octets(n, k // 2), f"{name}_scale": scales, f"{name}_scale_2": torch.tensor(0.01)}
    from kvforge.worker.kernels.code_tables import NF4

    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    return {
        name: octets(n * k // 2, 1),
        f"{name}.absmax": torch.full((n * k // 64,), 0.03),
        f"{name}.quant_map": torch.tensor(NF4),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def write_folder(kind: str, layers: int, folder: Path) -> int:
    """Write a folder, and return the bytes of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 128,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight"):
            tensors |= projection(kind, name, *weight.shape)
        else:
            made = torch.ones(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * 0.02
            tensors[name] = made.bfloat16()
    folder.mkdir()
    file = folder / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "quantization_config": FORMATS[kind]}
    (folder / "config.json").write_text(json.dumps(values))
    return file.stat().st_size


def anonymous_bytes() -> int:
    """Return the anonymous bytes of this process that are in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel counts no anonymous memory")


class PeakOfMemory:
    """Watches the memory of a device while it is entered: torch's of a GPU, or anonymous memory of this process."""

    def __init__(self, device: Device) -> None:
        self._owns = device.owns_memory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self.base = self.peak = self.used()
        if self._owns:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns:
            self.peak = torch.cuda.max_memory_allocated()
            return
        self._ended.set()
        self._thread.join()

    def used(self) -> int:
        """Return the bytes in use."""
        return torch.cuda.memory_allocated() if self._owns else anonymous_bytes()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.peak = max(self.peak, anonymous_bytes())


def measure(kind: str, layers: int, name: str) -> dict[str, Any]:
    """Measure one format in this process."""
    import kvforge.worker.step.loop  # noqa: F401 - all that a worker imports
    from kvforge.worker.loading.load import load_model

    device = open_device(name)
    settings: dict[str, Any] = {"device": device, "block_size": 16}
    if not device.owns_memory:
        settings["weight_dtype"] = "auto"
    with tempfile.TemporaryDirectory() as made:
        small, large = Path(made, "small"), Path(made, "large")
        small_size, size = write_folder(kind, 1, small), write_folder(kind, layers, large)
        load_model(small, **settings)
        found = {"format": kind, "folder_bytes": size, "small_bytes": small_size, "device": device.name}
        for name, folder in (("small_", small), ("", large)):
            gc.collect()
            device.release_cached()
            with PeakOfMemory(device) as memory:
                model = load_model(folder, **settings)
                found["kept_in"] = model.info.weight_dtype
                gc.collect()
                device.release_cached()
                found[f"{name}after_bytes"] = memory.used() - memory.base
            found[f"{name}peak_bytes"] = memory.peak - memory.base
            del model
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.layers, arguments.device)))
        return
    rows, results = [], []
    for kind in arguments.formats.split(","):
        command = [sys.executable, "-m", "benchmarks.load_peak", "--child", kind, "--layers", str(arguments.layers)]
        command += ["--device", arguments.device]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(printed.splitlines()[-1])
        results.append(found)
        size, peak = found["folder_bytes"], found["peak_bytes"]
        numbers = [f"{each / 1e6:.0f}" for each in (size, found["small_peak_bytes"], peak, found["after_bytes"])]
        share = (peak - found["small_peak_bytes"]) / (size - found["small_bytes"])
        rows.append([f"{kind} (kept in {found['kept_in']})", *numbers, f"{share:.2f}", str(AIM)])
        print(*rows[-1], flush=True)
    title = f"loading a quantised folder on {results[0]['device']}, MB"
    report(
        title,
        ["format", "folder", "peak of one layer", "peak", "after", "peak for a byte", "aim"],
        rows,
        results,
        arguments.json,
    )


if __name__ == "__main__":
    main()

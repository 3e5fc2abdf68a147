"""Loading: from a name or a path to a model in memory, with proof that it computes what it should.

source.py       finds the model's files
configuration.py, gguf.py, rope.py   read the model's configuration, tensors and rotary embedding from its files
build.py        transformers builds the model and fills in the weights
weight_stream.py, streamed_files.py   reads weights in parallel, straight into a device's memory
early_checks.py   checks kernels while weights are read
report.py       rejects tensors of the files that are left over, and tensors of the model that are missing
sampling_defaults.py   the model's default sampling parameters
quantisation.py, gguf_groups.py   the bits of its weights, and weights that a file stores in 4 bits
published/       formats that quantised folders are published in; quantised_reader.py reads them
coded_parts.py   parts of a transformers model with weights in codes
code_packer.py   weights in codes for a GPU's kernels
fingerprint.py  a hash of everything loaded
lazy_compiler.py   imports transformers without the parts of torch that serving does not use
progress.py     transformers' progress bars as fractions
model.py        the loaded model and its forward pass; fusion.py: the fused form of models with known layers
probe.py        each layer's attention parameters; verification.py: compares with transformers' own results
row_independence.py   transformers' own layers with row-independent parts; trial.py: tests that independence
determinism.py  the determinism guarantee of a model, or the reason why there is none
draft_model.py, beside.py   joins a model with what drafts for it; heads.py: heads; mtp*.py, eagle_heads.py load them
serving_kernels.py   the kernels that serve the model, for people
load.py         the whole load, in order

Law: every result that is served was compared with an implementation that does not share its faults. Code outside calls
`load.load_model`, and the `forward` and `decode` of the `model.LoadedModel` that it returns.
"""

from . import lazy_compiler as lazy_compiler  # before the files below import transformers
from .build import build
from .configuration import MODEL_DTYPES, model_dtype, read_config
from .fingerprint import fingerprint
from .gguf_reading import gguf_read_once
from .progress import Progress
from .rope import context_tokens
from .sampling_defaults import model_sampling
from .source import LOAD_FORMATS, MODEL_CONFIGS, Source, find_source, known_configs

__all__ = [
    "LOAD_FORMATS",
    "MODEL_CONFIGS",
    "MODEL_DTYPES",
    "Progress",
    "Source",
    "build",
    "context_tokens",
    "find_source",
    "fingerprint",
    "gguf_read_once",
    "known_configs",
    "model_dtype",
    "model_sampling",
    "read_config",
]

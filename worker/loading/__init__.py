"""From a name or a path to a model in memory that is the one that was asked for, and computes what it should.

source.py       what a path is
configuration.py, gguf.py, rope.py   what its files say about the model
build.py        transformers builds it and fills in the weights
report.py       nothing of the files may be left over, nothing of the model left out
sampling_defaults.py   how the model wants its tokens drawn
quantisation.py, gguf_groups.py   in how many bits its weights stay, and those that a file holds in 4
fingerprint.py  what was loaded, as one number
lean.py         transformers, imported without what serving has no use for
progress.py     what transformers draws on the terminal, as fractions
model.py        the loaded model and its forward pass; fusion.py: the fused form of those whose layers are known
probe.py        what each layer asks of attention; verification.py: does it compute what transformers' own does
steadied.py     transformers' own layers, of parts that compute each row by itself; trial.py: whether they do
determinism.py  what is promised of a model, and why not
serving_kernels.py   which kernels serve it, for people
load.py         all of it, in order

Law: nothing is served that was not compared with something that does not share its faults. Outside, `load.load_model`
makes a `model.LoadedModel`, and its `forward` and `decode` are called.
"""

from . import lean as lean  # before the files below import transformers
from .build import build
from .configuration import MODEL_DTYPES, model_dtype, read_config
from .fingerprint import fingerprint
from .progress import Progress, gguf_read_once
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

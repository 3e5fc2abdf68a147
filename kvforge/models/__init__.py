"""Model files: their cache, the files of a model, and their headers. No weights are read here.

An incomplete or ambiguous model is refused by name, never guessed. A file in the store is always complete, even after
an interruption. `kvforge pull`, `kvforge up`, the tokenizer and the worker all use this package, so that they agree.

Other code uses `store.pull`, `store.find` and `store.default_cache_dir`; loaders also use `files` and the two header
readers.
"""

"""Models as files: where they are kept, which files make one, what their headers say. No weights are read here.

Its law: what is not whole, or could be meant in two ways, is refused by name and never guessed; and a file in the
store is whole whatever was interrupted. `kvforge pull`, `kvforge up`, the tokenizer and the worker all ask here, so
that they agree.

From outside: `store.pull`, `store.find` and `store.default_cache_dir`; `files` and the two header readers for who
loads.
"""

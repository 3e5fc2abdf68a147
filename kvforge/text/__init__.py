"""Text prompts and answers, with the extra `text`: encoding, incremental decoding, stop strings.

The package knows model files but no connection. It never loads torch, and loads transformers only with a tokenizer.
Text that was returned is never retracted.

Other code uses `tokenizer.Tokenizer`, `token_table.TokenTable` (tokens to text without transformers),
`stream.TextStream`, `stop.StopText`, and `grammar.check` for constraints on answers (with `grammar_bounds`). Workers
use `grammar_trials` and its process, `grammar_helper` and `grammar_trial`.
"""

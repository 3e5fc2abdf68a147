"""Text in and out, with the extra `text`: prompts to tokens, tokens to text as they come, stop strings in it.

Its law: it knows models as files and nothing of a connection; torch is never loaded, and transformers only when a
tokenizer is. Text that has been given out is never taken back.

From outside: `tokenizer.Tokenizer`, `stream.TextStream`, `stop.StopText`, and `grammar.check` (what an answer must look
like; `grammar_bounds` beside it). For workers: `grammar_trials` and its process, `grammar_helper` and `grammar_trial`.
"""

"""A gate for plain words: docstrings, comments, messages and Markdown, measured for each folder at the top."""

"""The command line: options, one run after the other, what is printed and what is left behind."""

"""The output for people: the HTML page, its pictures, tables, comparisons of two results, progress."""

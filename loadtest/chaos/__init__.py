"""The same load with processes that are killed in the middle of it, and whether anything was lost or changed."""

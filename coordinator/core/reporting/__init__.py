"""Reports: statistics, gauges, and explanations.

Reports change nothing, not even how fast the next one is made. All numbers of an answer belong to the same instant.
This package may read every other one; only the machine uses it.
"""

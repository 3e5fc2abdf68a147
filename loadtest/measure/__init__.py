"""From outcomes to numbers: percentiles, goodput, windows, the driver's own lag, and the causes of a slow tail."""

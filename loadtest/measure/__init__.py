"""From outcomes to numbers: percentiles, goodput, windows, the verdict on the driver itself, why the tail is slow."""

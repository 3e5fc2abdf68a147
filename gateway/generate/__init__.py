"""One answer as it comes: submitted, decoded, cut at stop strings, parsed; ended with the client that wanted it."""

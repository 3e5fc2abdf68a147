"""One answer: submission, detokenisation, stop strings, parsing, and cancellation when the client disconnects."""

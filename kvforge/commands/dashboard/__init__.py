"""The full screen of `kvforge top`, for the extra `terminal`."""

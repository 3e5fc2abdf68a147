"""What all of the paths share: bounded bodies, strict reading of fields, streams of events, errors."""

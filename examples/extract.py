"""Records from text: a JSON schema enforces the form of every answer.

    kvforge up --model smollm2-135m
    python examples/extract.py "Ada Lovelace, born in 1815, wrote the first program." < more_texts.txt

Prints one JSON object for each text. The model decides the content; the schema makes each answer valid.
"""

from __future__ import annotations

import argparse
import json
import sys

from kvforge import Client, SamplingParams

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "field": {"enum": ["science", "art", "politics", "other"]},
    },
    "required": ["name", "year", "field"],
    "additionalProperties": False,
}
PROMPT = "Write a JSON object with the person's name, the year of birth and the field of work.\nText: {text}"


def main() -> None:
    """Submit all texts at once, and print the records in their order."""
    parser = argparse.ArgumentParser(description="Extract records from texts.")
    parser.add_argument("texts", nargs="*", help="texts; lines of standard input follow")
    options = parser.parse_args()
    piped = [] if sys.stdin.isatty() else [line.strip() for line in sys.stdin if line.strip()]
    sampling = SamplingParams(json_schema=RECORD, temperature=0.0)
    with Client() as kv:
        kv.wait_ready(timeout_s=120)
        answers = [
            kv.generate_stream(PROMPT.format(text=text), max_tokens=200, sampling=sampling, retry_s=60)
            for text in [*options.texts, *piped]
        ]
        for answer in answers:
            print(json.dumps(json.loads(answer.result().text)))


if __name__ == "__main__":
    main()

"""A beam search over answers: every branch is a fork, and shares the KV of everything before it.

    kvforge up --model smollm2-135m
    python examples/tree_search.py "The three laws of robotics are"

Each round forks every kept sequence, continues each fork with its own seed, and keeps the most likely ones.
"""

from __future__ import annotations

import argparse

from kvforge import CachedSequence, Client, SamplingParams


def main() -> None:
    """Search, and print each round and the best answer."""
    parser = argparse.ArgumentParser(description="Search over answers by forks.")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--depth", type=int, default=4, help="rounds")
    parser.add_argument("--branches", type=int, default=3, help="forks of each kept sequence")
    parser.add_argument("--keep", type=int, default=2, help="sequences kept after each round")
    parser.add_argument("--tokens", type=int, default=12, help="tokens of a branch in each round")
    options = parser.parse_args()
    with Client() as kv:
        kv.wait_ready(timeout_s=120)
        trunk = kv.create_sequence(kv.encode(options.prompt, raw=True))
        kept: list[tuple[float, str, CachedSequence]] = [(0.0, options.prompt, trunk)]
        for depth in range(options.depth):
            forks = [(score, text, fork) for score, text, of in kept for fork in kv.fork(of, options.branches)]
            requests = [
                kv.submit(
                    sequence=fork,
                    max_tokens=options.tokens,
                    sampling=SamplingParams(temperature=1.0, seed=100 * depth + number, ignore_eos=True),
                )
                for number, (_, _, fork) in enumerate(forks)
            ]
            ends = [request.text().result() for request in requests]
            scored = [
                (score + sum(end.finished.logprobs), text + end.text, fork)
                for (score, text, fork), end in zip(forks, ends, strict=True)
            ]
            scored.sort(key=lambda branch: -branch[0])
            kv.remove([sequence for *_, sequence in [*kept, *scored[options.keep :]]])
            kept = scored[: options.keep]
            print(f"round {depth + 1}: {len(forks)} branches, best log-probability {kept[0][0]:.2f}")
        blocks = [kv.tables().sequence(sequence).blocks.tolist() for *_, sequence in kept]
        used = len(set().union(*blocks))
        print(f"blocks of the kept sequences: {sum(map(len, blocks))}, without sharing; {used} in use")
        print("best:", kept[0][1])
        kv.remove([sequence for *_, sequence in kept])


if __name__ == "__main__":
    main()

"""Generate tests/data/smollm2_chat.json: transformers' answers to conversations, by its template and tokenizer.

    python -m tests.gateway.chat_references

Greedy, float32, on a CPU, one conversation at a time; to the end token or 48 tokens. margins: log-probability of the
best token less that of the second best (nats); below the margin of the conformance sample, rounding may decide.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvforge.models import store

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "smollm2_chat.json"
TOKENS = 48
MODEL = "smollm2-135m"


def said(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation of alternating user and assistant messages."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def conversations() -> dict[str, list[dict[str, str]]]:
    """Return every text of the conformance sample that is no conversation itself, and difficult cases for templates."""
    cases = json.loads((DATA / "smollm2_sample.json").read_text(encoding="utf-8"))["cases"]
    plain = {case["id"]: said(case["text"]) for case in cases if "<|im_start|>" not in case["text"]}
    return plain | {
        "system": said("Name three rivers of Europe.", system="You answer in one line."),
        "empty-system": said("Name a colour.", system=""),
        "turns": said("My name is Ada.", "Nice to meet you, Ada!", "What is my name?"),
        "four-turns": said("Hi", "Hello!", "Count to three.", "1, 2, 3", "Now to five.", system="Be brief."),
        "emoji": said("What does 👩🏽‍🚀 mean? And 🇳🇴?"),
        "cjk": said("请用中文说“你好，世界”。"),  # noqa: RUF001 - as it is written there
        "combining": said("Write cafe\u0301 and ca\u0308fe in capital letters."),
        "blanks": said("  \n\n  What is 2 + 2?  \t\n"),
        "tabs": said("def f(x):\n\treturn x\n\nWhat does f do?"),
        "digits": said("What is 12345 + 67890?"),
        "its-own-marks": said("Say <|endoftext|> and <| im_start |>."),
        "right-to-left": said("ما هي عاصمة فرنسا؟"),
    }


def answered(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return the prompt as ids, the answer as ids and text, and each token's margin."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    done = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = done.sequences[0, len(prompt) :].tolist()
    best = [torch.log_softmax(row[0].float(), -1).topk(2).values for row in done.scores]
    return {
        "messages": messages,
        "prompt_tokens": prompt,
        "tokens": tokens,
        "margin": [round(float(first - second), 4) for first, second in best],
        "text": tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "finish_reason": "stop" if tokens[-1] == tokenizer.eos_token_id else "length",
    }


def main() -> None:
    """Writes the file."""
    file = store.pull(MODEL)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    cases = {name: answered(model, tokenizer, messages) for name, messages in conversations().items()}
    about = f"transformers {version('transformers')}, torch {torch.__version__}, float32, CPU; see chat_references.py"
    found = {"about": about, "model": file.name, "cases": cases}
    FILE.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for name, case in cases.items():
        print(f"{name:14} {len(case['prompt_tokens']):3} {case['finish_reason']:6} {case['text']!r}")


if __name__ == "__main__":
    main()

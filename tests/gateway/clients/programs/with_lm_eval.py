"""lm-eval over OpenAI's API, with a task of its own: the included ones fetch their questions from the network."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [{"question": "Say hello.", "answer": "Hello from the model."}] * 4
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "hello.yaml").write_text(
        f"""task: hello
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], temperature: 0, max_gen_toks: 30}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
    )
    where = f"model=scripted,base_url={os.environ['URL']}/v1/chat/completions,num_concurrent=2,tokenized_requests=False"
    found = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=where,
        tasks=["hello"],
        apply_chat_template=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
print(json.dumps(found["results"]["hello"]["exact_match,none"]))

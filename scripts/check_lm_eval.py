"""Runs the real lm-evaluation-harness on the default model, with tasks made on the spot: no download of data.

    pip install 'turbojax[eval]'
    python scripts/check_lm_eval.py

Scores are compared with the model's own log-probabilities, computed without the harness's adapter.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager

from turbojax.hub import default_model
from turbojax.integrations.lm_eval import TurbojaxLM
from turbojax.lite.evaluate import window_logprobs
from turbojax.models.model import load_model
from turbojax.tokenizer import load_tokenizer

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "Madrid"], "answer": 0},
    {"question": "Two plus two is", "choices": ["seven", "four", "nine"], "answer": 1},
    {"question": "The sun rises in the", "choices": ["west", "north", "east"], "answer": 2},
]
TEXTS = [{"text": "It was the best of times, it was the worst of times, it was the age of wisdom."}]
CHATS = [{"question": "What is the capital of France? Answer with one word.", "answer": "Paris"}]


def task(folder: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    """A task file with its data beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{name}.yaml").write_text(json.dumps(common | {"test_split": "test"} | fields))  # JSON is YAML


def make_tasks(folder: Path) -> list[str]:
    task(
        folder, "local_choice", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}",
        doc_to_choice="choices", doc_to_target="answer", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    task(
        folder, "local_rolling", TEXTS, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    task(
        folder, "local_chat", CHATS, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 16}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    return ["local_choice", "local_rolling", "local_chat"]


def own_word_perplexity(text: str) -> float:
    """Of the text behind the start token, from the pure steps alone."""
    path = default_model()
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    ids = [tokenizer.bos_id, *tokenizer.encode(text, add_special_tokens=False)]
    [logprobs] = window_logprobs(load_model(path, dtype="float32").weights, np.asarray([ids], np.int32))
    return math.exp(-float(logprobs.sum(dtype=np.float64)) / len(text.split()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = make_tasks(Path(folder))
        lm = TurbojaxLM(dtype="float32", session_len=512, cache_max_entry_count=64, max_batch_size=8)
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(
            model=lm, tasks=names, task_manager=manager, apply_chat_template=False, bootstrap_iters=0
        )
        chat = lm_eval.simple_evaluate(
            model=lm, tasks=["local_chat"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0
        )
        lm.pipe.close()
    for results in (found, chat):
        print(json.dumps(results["results"], indent=2, default=str))
    print("a chat's answer:", chat["samples"]["local_chat"][0]["resps"])
    assert found["results"]["local_choice"]["acc,none"] == 1.0
    measured, own = found["results"]["local_rolling"]["word_perplexity,none"], own_word_perplexity(TEXTS[0]["text"])
    assert math.isclose(measured, own, rel_tol=1e-3), (measured, own)
    assert "Paris" in chat["samples"]["local_chat"][0]["resps"][0][0]


if __name__ == "__main__":
    main()

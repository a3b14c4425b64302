"""SAF in the Hugging Face Trainer: from which package of the standard library is a function?

The texts are the functions of the Python that runs this, as bytes; the model is a small BERT with
random weights. So nothing is downloaded.

    pip install '.[transformers]'
    python examples/transformers_text.py
    python examples/transformers_text.py --method mesa
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from saltflat import MESA, SAF, decay_for_half_life
from saltflat.integrations.transformers import TrajectoryTrainer

PACKAGES = ["asyncio", "email", "importlib", "multiprocessing", "unittest", "xml"]
LENGTH, BATCH = 64, 32


def functions(package: str) -> list[str]:
    """The bodies of a package's functions."""
    found = set()
    for path in (Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"):
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add("\n".join(lines[node.lineno : node.end_lineno]).strip())
    return random.Random(0).sample(sorted(found), 300)


def load() -> tuple[Dataset, Dataset]:
    """A token is a byte, 256 fills up; half of the functions are to train on, half to test on."""
    rows = []
    for label, package in enumerate(PACKAGES):
        for text in functions(package):
            tokens = list(text.encode()[:LENGTH])
            rows.append({"input_ids": tokens + [256] * (LENGTH - len(tokens)), "labels": label})
    return Dataset.from_list(rows[::2]), Dataset.from_list(rows[1::2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["saf", "mesa"], default="saf")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="runs/transformers_text")
    args = parser.parse_args()
    set_seed(0)
    train_set, test_set = load()
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 257, "pad_token_id": 256}
    sizes["num_labels"] = len(PACKAGES)
    model: Any = BertForSequenceClassification(BertConfig(**sizes))
    often: Any = {"logging_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
    how: Any = {"per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "report_to": "none"}
    settings = TrainingArguments(args.out, num_train_epochs=args.epochs, **often, **how)
    term: SAF | MESA = SAF(len(train_set), len(PACKAGES), lag=1, start_epoch=args.epochs // 3)
    if args.method == "mesa":
        decay = decay_for_half_life(1, steps_per_epoch=len(train_set) // BATCH)
        term = MESA(model, decay=decay, start_epoch=args.epochs // 3)
    trainer = TrajectoryTrainer(model, settings, train_dataset=train_set, term=term)
    trainer.train()
    logits, labels, _ = trainer.predict(test_set)
    accuracy = (np.argmax(logits, 1) == labels).mean()
    chance = 100 / len(PACKAGES)
    print(f"{args.method}: test accuracy {100 * accuracy:.1f} % (by chance {chance:.0f} %)")


if __name__ == "__main__":
    main()

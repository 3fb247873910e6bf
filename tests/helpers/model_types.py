"""Every model type of transformers in `gradckpt plan`, with the config that its class has by
default: does it run, or say in one sentence why not?"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto import modeling_auto as auto

from gradckpt._planning.command import main as plan

SETTINGS = {
    "plain": (),
    "lora": ("--lora", "r=16"),
    "bf16-mixed": ("--dtype", "bf16-mixed"),
    "nf4": ("--lora", "r=16", "--weights", "nf4"),
}

#: Which class of a type is planned: the first of these that it has.
TASKS = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION"),
    *("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"),
)

#: Fields that say how many blocks there are.
_DEPTHS = re.compile(r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_(en|de)coder_layers)$")

#: Seconds of a type and a setting.
PATIENCE = 300


class Answer(NamedTuple):
    """``status``: as the command's; None: an exception came out of it, or it took too long."""

    model_type: str
    setting: str
    status: int | None
    text: str


def class_of(model_type: str, of_parts: bool) -> str | None:
    """Return the class to train, any that transformers lists if there is none with a known loss.
    ``of_parts``: the config is that of a language model and others together.
    """
    tasks = sorted(TASKS, key=lambda task: task != "IMAGE_TEXT_TO_TEXT") if of_parts else TASKS
    mappings = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks]
    mappings += [each for name, each in vars(auto).items() if name.endswith("_MAPPING_NAMES") and "CONFIG" not in name]
    found = next((mapping[model_type] for mapping in mappings if model_type in mapping), None)
    return found if found is None or isinstance(found, str) else found[0]


def shallow(entries: dict[str, Any]) -> None:
    """Leave at most three blocks, where a config has a number and no list of them."""
    if any(isinstance(each, (list, dict)) and len(each) > 8 for each in entries.values() if not isinstance(each, dict)):
        return
    for name, value in entries.items():
        if isinstance(value, dict) and "model_type" in value:
            shallow(value)
        elif _DEPTHS.search(name) and isinstance(value, int):
            entries[name] = min(value, 3)


def config_of(model_type: str) -> dict[str, Any] | None:
    """Return the entries of a config.json, None if the class has no default."""
    try:
        entries = json.loads(json.dumps(transformers.CONFIG_MAPPING[model_type]().to_dict(), default=str))
    except Exception:  # each has its own
        return None
    shallow(entries)
    kind = class_of(model_type, "text_config" in entries)
    return {**entries, "model_type": model_type, **({} if kind is None else {"architectures": [kind]})}


def ask(folder: str, model_type: str, setting: str) -> Answer:
    """Run the command; it says itself how many tokens a model takes."""
    given: list[str] = ["--tokens", "512"]
    for _ in range(2):
        out, errors = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                return Answer(model_type, setting, plan([folder, *SETTINGS[setting], *given]), out.getvalue())
        except SystemExit as error:
            text = errors.getvalue().strip().splitlines()[-1]
            answer = Answer(model_type, setting, int(error.code or 0), text)
        except Exception as error:
            return Answer(model_type, setting, None, f"{type(error).__name__}: {error}")
        if "leave out the number of tokens" in text:
            given = []
        elif found := re.search(r"the model has ([\d,]+) positions; give fewer", text):
            given = ["--tokens", found[1].replace(",", "")]
        else:
            break
    return answer


def answers(model_types: list[str], settings: list[str]) -> Iterator[Answer]:
    """Plan each type in each setting."""
    for model_type in model_types:
        entries = config_of(model_type)
        if entries is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(entries))
            for setting in settings:
                yield _within(PATIENCE, folder, model_type, setting)


def _within(seconds: int, folder: str, model_type: str, setting: str) -> Answer:
    def late(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return ask(folder, model_type, setting)
    except KeyboardInterrupt:
        return Answer(model_type, setting, None, f"more than {seconds} s")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

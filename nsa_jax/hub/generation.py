"""What a checkpoint says about generation: the tokens that end a text, pad rows and begin one, and how to draw.

Imports keep it among the settings of the tokenizer, which runs and exports keep, too: `Generator` ends at all of its
end tokens, and `export_native` writes it back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nsa_jax.data import Tokenizer
from nsa_jax.hub.export_files import read_json

FILE = "generation_config.json"
_SETTING = "generation_config"  # among the tokenizer's settings
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WRITERS_OWN = ("transformers_version", "_from_model_config")


def _ids(value: Any) -> list[int]:
    """The token ids of a field that holds one, several or none; other values, such as -1 for none, are left out."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def keep_generation(tokenizer: Tokenizer, directory: Path, described: dict[str, Any]) -> None:
    """Puts what a checkpoint says about generation among the settings of its tokenizer.

    Args:
      tokenizer: the checkpoint's own.
      directory: of the checkpoint.
      described: its config.json, whose ids count where generation_config.json has none.

    Raises:
      LoadError: generation_config.json is damaged.
    """
    found = read_json(directory, FILE) if os.path.lexists(directory / FILE) else {}
    found = {name: value for name, value in found.items() if name not in _WRITERS_OWN}
    for name in _IDS:
        ids = _ids(found.get(name)) or _ids(described.get(name))
        found.pop(name, None)
        if ids:
            found[name] = ids if len(ids) > 1 else ids[0]
    tokenizer.settings = {**tokenizer.settings, _SETTING: found}


def is_imported(tokenizer: Tokenizer) -> bool:
    """Whether a model began as the checkpoint of another program, whose tokenizer this is."""
    return _SETTING in tokenizer.settings


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: the end of a document, and what the checkpoint of an imported model names."""
    kept = tokenizer.settings.get(_SETTING)
    found = _ids(kept.get("eos_token_id")) if isinstance(kept, dict) else []
    return found if tokenizer.eos_id in found else [int(tokenizer.eos_id), *found]


def generation_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json that goes with a tokenizer; rows are padded with its end token if nothing is known."""
    kept = tokenizer.settings.get(_SETTING)
    ends = end_ids(tokenizer)
    found: dict[str, Any] = {"bos_token_id": None, **(kept if isinstance(kept, dict) else {})}
    found["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if not tokenizer.settings.get("pad_token"):
        found.setdefault("pad_token_id", int(tokenizer.eos_id))
    return found


def token_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of a generation_config.json that config.json has, too."""
    return {name: fields[name] for name in _IDS if name in fields}


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's settings without those about generation."""
    return {name: value for name, value in tokenizer.settings.items() if name != _SETTING}

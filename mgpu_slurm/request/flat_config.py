"""The config of a run as one level of names, for tables and trackers."""

from __future__ import annotations

from typing import Any

from mgpu_slurm.request.spec import Spec


def identity(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return the target of a run and its values: those of a command are its `--name value` and `name=value`."""
    if spec.target.command is None:
        return spec.target.label, flattened(spec.config)
    words, config, rest = list(spec.target.command), {}, []
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if equals and name:
            config[name] = value
        elif word.startswith("--") and name and words and not words[0].startswith("--"):
            config[name] = words.pop(0)
        else:
            rest.append(word)
    return " ".join(rest), config


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"model.width": 32}` for `{"model": {"width": 32}}`."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found

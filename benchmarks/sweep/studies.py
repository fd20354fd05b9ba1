"""Sweeps as a person starts them, and what their studies say afterwards."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from benchmarks.project import MGPU, Project

_NUMBERS = itertools.count()


def search(made: Project, **values: Any) -> Path:
    """Runs a sweep to its end on the local executor; its folder.

    Args:
        values: of its file, but for its name.
    """
    name = f"study-{next(_NUMBERS)}"
    file = made.base / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"study": name} | values))
    made.call([*MGPU, "sweep", str(file), "--executor", "local"])
    return made.runs / name


def trials_of(folder: Path) -> list[FrozenTrial]:
    """As Optuna itself reads them out of the journal."""
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(study_name=folder.name, storage=storage).trials

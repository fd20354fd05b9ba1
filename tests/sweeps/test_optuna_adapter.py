"""The private names of Optuna: which version has them, that they are there, and that one module alone uses them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from optuna.samplers import CmaEsSampler, TPESampler
from optuna.samplers._tpe import sampler as tpe
from optuna.storages import JournalStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial

from mgpu_slurm.sweeps import optuna_adapter
from tests.support import REPOSITORY

WRITTEN_AGAINST = "5.0.0"
OLDEST = "5.0"

STUDY = optuna.create_study()
TRIAL = STUDY.ask()

NAMES: list[tuple[Any, tuple[str, ...]]] = [
    (STUDY, ("_storage", "_study_id", "_thread_local", "_get_trials")),
    (STUDY._thread_local, ("cached_all_trials",)),
    (TRIAL, ("_trial_id",)),
    (TRIAL._get_latest_trial(), ("_trial_id",)),
    (JournalStorage, ("_sync_with_backend",)),
    (RDBStorage, ("_create_new_trial", "_get_prepared_new_trial")),
    (tpe, ("default_gamma", "_RELATIVE_PARAMS_KEY", "_SYSTEM_ATTR_MAX_LENGTH")),
    (
        TPESampler(),
        ("_gamma", "_sample", "_build_parzen_estimator", "_compute_acquisition_func", "_get_params", "_rng"),
    ),
    (CmaEsSampler, ("_attr_key_optimizer", "_restore_optimizer", "_init_optimizer", "_split_optimizer_str")),
]


def modules() -> list[str]:
    paths = sorted((REPOSITORY / "mgpu_slurm" / "sweeps").rglob("*.py"))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths]
    return [name for name in names if not name.endswith(("__init__", "optuna_adapter"))]


def test_optuna_versions_match_constraints_and_pyproject() -> None:
    words = " ".join((optuna_adapter.__doc__ or "").split())
    assert f"written for Optuna {WRITTEN_AGAINST}, and {OLDEST} is the oldest supported version" in words
    assert f"\noptuna=={WRITTEN_AGAINST}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert f'"optuna>={OLDEST}"' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("owner", "name"),
    # not the text of an owner, which may contain its address: test workers have to agree on the names of the tests
    [pytest.param(owner, name, id=name) for owner, names in NAMES for name in names],
)
def test_installed_optuna_has_each_name_of_the_table(owner: Any, name: str) -> None:
    assert hasattr(owner, name)


def test_journal_of_returns_the_backend_of_a_journal_study(tmp_path: Path) -> None:
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    study = optuna.create_study(storage=JournalStorage(backend))
    assert optuna_adapter.journal_of(study) is backend
    assert optuna_adapter.journal_of(STUDY) is None


def test_table_lists_every_private_name_the_adapter_uses() -> None:
    source = (REPOSITORY / "mgpu_slurm" / "sweeps" / "optuna_adapter.py").read_text()
    tree = ast.parse(source)
    own = {"_study", "_shown", "_is_prepared", "_optimizer", "_kept", "_asked_gamma"}
    nodes = list(ast.walk(tree))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imported = [node for node in nodes if isinstance(node, ast.ImportFrom) and "._" in (node.module or "")]
    used |= {alias.name for node in imported for alias in node.names}
    used = {name for name in used if re.match(r"_[a-zA-Z]", name) and not name.startswith("__")}
    assert used - own == {name for _, names in NAMES for name in names if name.startswith("_")}


@pytest.mark.parametrize("name", modules())
def test_no_other_module_uses_private_names_of_optuna(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__ or "").read_text())
    of_others = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and not _is_own(node.value)
    }
    assert of_others == set()
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [each for each in imported if each.startswith("optuna") and "._" in each] == []
    assert _overridden(module) == set()


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _overridden(module: ModuleType) -> set[str]:
    """Return the private names of Optuna's classes that the module's own classes define again."""
    found: set[str] = set()
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            bases = [base for base in cls.__mro__ if base.__module__.startswith("optuna.")]
            private = {name for base in bases for name in vars(base) if re.match(r"_[a-z]", name)}
            found |= vars(cls).keys() & private - {"_abc_impl"}
    return found


def test_queued_trial_stores_its_parameters_in_fixed_params() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 1})
    assert study.trials[0].system_attrs[optuna_adapter.FIXED_PARAMS] == {"x": 1}


def test_read_trial_returns_the_current_state() -> None:
    study = optuna.create_study()
    trial: Trial = study.ask()
    before: FrozenTrial = optuna_adapter.read_trial(study, trial)
    optuna_adapter.set_trial_attribute(study, before, "key", 1)
    assert optuna_adapter.read_trial(study, before).system_attrs["key"] == 1

"""The storage of a study: its own journal file, or a database given by its URL."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from optuna.storages import BaseStorage
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from mgpu_slurm.core.errors import UserError
from mgpu_slurm.sweeps.search.sweep import Sweep
from mgpu_slurm.sweeps.study.database import Database, no_study
from mgpu_slurm.sweeps.study.journal import Journal, JournalFile

_VARIABLE = re.compile(r"\$\{(\w+)\}")

_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}
"""Drivers for URLs that name none; SQLAlchemy's default differs between its versions."""


def storage_of(sweep: Sweep, journal: Path, is_new: bool = False) -> BaseStorage:
    """Return the storage of the study.

    Args:
        journal: absolute path of its own file, used if the sweep names no database.
        is_new: create the tables of a database; workers that did so at the same moment would break it. If False, the
            study must exist.

    Raises:
        UserError: a variable of the URL is not set, a driver is missing, or there is no such study.
        ClusterError: the database refuses, or does not answer.
    """
    if sweep.storage is None:
        if not is_new and not journal.exists():
            raise no_study(str(journal), sweep.study)
        made: BaseStorage = Journal(JournalFile(journal, is_new))
    else:
        made = Database(_url(sweep.storage), sweep.storage, is_new)
    if not is_new:
        try:
            made.get_study_id_from_name(sweep.study)
        except KeyError:
            raise no_study(sweep.storage or str(journal), sweep.study) from None
    return made


def _url(text: str) -> URL:
    expanded = _expanded(text)
    try:
        url = make_url(expanded)
    except (ArgumentError, ValueError):
        # without its message, which may contain a value
        raise UserError(f"storage {text!r}: it is not a URL after its variables are replaced") from None
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def _expanded(text: str) -> str:
    """Return the URL with the values of its variables, which are not in any file.

    Values in the user, password and options may be any text; elsewhere a value is inserted unquoted.
    """
    host, options = text.rfind("@"), text.find("?")

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UserError(f"storage {text!r}: {match[0]} is not set: export it, also where the workers run")
        found = os.environ[match[1]]
        is_text = match.start() < host or 0 < options < match.start()
        return quote(found, safe="") if is_text else found

    return _VARIABLE.sub(value, text)

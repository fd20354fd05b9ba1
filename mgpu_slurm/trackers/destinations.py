"""Where reports are sent: `mlflow=URI` and `wandb=PROJECT`, checked before a run is submitted."""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mgpu_slurm.core.errors import UserError, nearest

MLFLOW, WANDB = "mlflow", "wandb"
TRACKERS = (MLFLOW, WANDB)

WANDB_OFFLINE = ("offline", "dryrun")
"""Modes in which W&B writes to files only."""

NONE = "none"
"""As the only sink of a call: no tracker, whatever the cluster file has."""

_SQLITE = re.compile(r"sqlite(\+\w+)?:///(?P<file>.+)")
_MLFLOW_SCHEMES = ("http", "https", "postgresql", "mysql", "mssql")
_MLFLOW_EXAMPLE = "such as mlflow=http://HOST:5000, or mlflow=sqlite:///mlflow.db on this machine"


@dataclass(frozen=True)
class Destination:
    """A project in a tracker."""

    tracker: str
    place: str
    """MLflow: the URI of the server or database, and `#EXPERIMENT`. W&B: `PROJECT` or `ENTITY/PROJECT`."""

    @staticmethod
    def parse(text: str) -> Destination:
        """Return the destination that `str` has made a text of."""
        tracker, _, place = text.partition("=")
        return Destination(tracker, place)

    def __str__(self) -> str:
        return f"{self.tracker}={self.place}"

    @property
    def is_file(self) -> bool:
        """Return whether it is a database that only processes of one machine can safely share."""
        return self._database is not None

    @property
    def files(self) -> list[Path]:
        """Return the files of such a database; some of them exist only while it is written."""
        return [Path(self._database + end) for end in ("", "-journal", "-wal", "-shm")] if self._database else []

    @property
    def _database(self) -> str | None:
        found = _SQLITE.match(self.place.partition("#")[0]) if self.tracker == MLFLOW else None
        return None if found is None else found["file"].partition("?")[0]


def database_files(texts: Iterable[str]) -> list[Path]:
    """Return the files of the databases among destinations, as `str` has written them."""
    return [file for text in texts for file in Destination.parse(text).files]


def resolve(texts: Iterable[str], cwd: Path, project: str) -> tuple[Destination, ...]:
    """Return the destinations that a call names, with what it leaves open taken from the trackers' own variables.

    Args:
        cwd: the folder that relative paths start from.
        project: the name of the project, if nothing else names one.

    Raises:
        UserError: a destination is invalid or incomplete, or its library is not installed.
    """
    texts = tuple(texts)
    if texts == (NONE,):
        return ()
    found = tuple(_resolved(text, cwd, project) for text in texts)
    for tracker in TRACKERS:
        if sum(each.tracker == tracker for each in found) > 1:
            raise UserError(f"{tracker}: given twice: name one place")
    return found


def check_shared(found: Iterable[Destination], is_this_machine: bool) -> None:
    """Check that the run can reach its trackers.

    Args:
        is_this_machine: whether the run stays on this machine.

    Raises:
        UserError: SQLite would be used by several machines.
    """
    for destination in found:
        if destination.is_file and not is_this_machine:
            raise UserError(
                f"--sink {destination}: SQLite is not safe on a file system that several nodes share: name a server,"
                " or send the run when it has ended with `export RUN --to mlflow=...`"
            )


def notes(found: Iterable[Destination], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return human-readable notes on trackers that will refuse what the run sends, as far as it shows now.

    Args:
        environ: the environment of the job; a cluster's `setup` may set more.
    """
    if all(each.tracker != WANDB for each in found) or _has_wandb_login(environ):
        return ()
    return ("note      W&B has no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline",)


def _has_wandb_login(environ: Mapping[str, str]) -> bool:
    """Return whether W&B will find an API key, or needs none, without the second that its import takes."""
    if environ.get("WANDB_MODE") in WANDB_OFFLINE:
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # W&B itself says what is wrong with an address or a file that cannot be read
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        logins = netrc.netrc(os.path.expanduser(environ.get("NETRC") or "~/.netrc"))
        if logins.authenticators(host) is not None:
            return True
    with suppress(OSError):
        folder = os.path.expanduser(environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
        # they may have a key, or name another server
        settings = Path(folder, "settings").read_text(errors="replace")
        return "api_key" in settings or "base_url" in settings
    return False


def _resolved(text: str, cwd: Path, project: str) -> Destination:
    tracker, _, place = text.partition("=")
    if tracker not in TRACKERS:
        raise UserError(f"--sink {text}: expected mlflow[=URI] or wandb[=PROJECT]{nearest(tracker, list(TRACKERS))}")
    _check_installed(tracker)
    if tracker == WANDB:
        return Destination(WANDB, _wandb_project(place, project))
    return Destination(MLFLOW, _mlflow_place(place, cwd, project))


def _check_installed(tracker: str) -> None:
    if importlib.util.find_spec(tracker) is None:
        raise UserError(f"{tracker}: not installed: pip install 'mgpu-slurm[{tracker}]'")


def _wandb_project(place: str, project: str) -> str:
    if os.environ.get("WANDB_MODE") == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        raise UserError("wandb: WANDB_MODE is disabled: unset it and WANDB_DISABLED, or name no wandb")
    place = place or os.environ.get("WANDB_PROJECT") or project
    entity = os.environ.get("WANDB_ENTITY")
    if not re.fullmatch(r"([^/\\#?%:]+/)?[^/\\#?%:]+", place):
        raise UserError(f"wandb={place}: expected PROJECT or ENTITY/PROJECT, without any of \\ # ? % :")
    return f"{entity}/{place}" if entity and "/" not in place else place


def _mlflow_place(place: str, cwd: Path, project: str) -> str:
    uri, _, experiment = (place or os.environ.get("MLFLOW_TRACKING_URI") or "").partition("#")
    if not uri:
        raise UserError(f"mlflow: no URI, and MLFLOW_TRACKING_URI is not set: name one, {_MLFLOW_EXAMPLE}")
    experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
    if uri.startswith("file:") or "/" in uri.partition(":")[0]:
        raise UserError(f"mlflow={uri}: MLflow no longer accepts folders: name a database, {_MLFLOW_EXAMPLE}")
    if not _is_mlflow_uri(uri):
        raise UserError(f"mlflow={uri}: expected the URI of a server or database, {_MLFLOW_EXAMPLE}")
    if (sqlite := _SQLITE.fullmatch(uri)) is not None:
        # without the fourth slash, the path is relative
        path = cwd / Path(sqlite["file"]).expanduser()
        if not path.parent.is_dir():
            raise UserError(f"mlflow={uri}: there is no folder {str(path.parent)!r}: create it")
        uri = f"{uri[: sqlite.start('file')]}{os.path.normpath(path)}"
    elif urlsplit(uri).password is not None:
        raise UserError(
            "mlflow: the URI has a password, which the run's files would show: set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD, or the database's own variable such as PGPASSWORD, and leave it out"
        )
    return f"{uri}#{experiment}"


def _is_mlflow_uri(uri: str) -> bool:
    if _SQLITE.fullmatch(uri) or re.fullmatch(r"databricks(://\w+)?", uri):
        return True
    try:
        parts = urlsplit(uri)
    except ValueError:
        return False
    return parts.scheme.partition("+")[0] in _MLFLOW_SCHEMES and bool(parts.hostname)

"""The secret with which the ranks of an attempt sign their messages to each other (see `signed_store`).

Any user of the nodes can reach the rendezvous. The secret's file is readable only by the run's owner and exists only
during the attempt.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mgpu_slurm.core.errors import RendezvousError
from mgpu_slurm.core.processes import TRIAL_VARIABLE
from mgpu_slurm.request.spec import ATTEMPT_VARIABLE

VARIABLE = "MGPU_SECRET"
"""Variable with the path of the secret's file."""

_OF_A_STORE = (ATTEMPT_VARIABLE, TRIAL_VARIABLE, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that identify a store within an attempt: the run's own, a trial's, or that of a script's launcher."""


def create(path: Path) -> None:
    """Write a new secret to the file.

    Raises:
        OSError: The file cannot be written.
    """
    with suppress(FileNotFoundError):
        # left by a forgotten attempt of the same number
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())


def key_of_store(environ: Mapping[str, str]) -> bytes | None:
    """Return the key that signs the entries of this process's store, or None if this is not a process of a run.

    Entries signed for another store, such as that of an earlier attempt, are invalid in this one.

    Raises:
        RendezvousError: The secret cannot be read.
    """
    path = environ.get(VARIABLE)
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise RendezvousError(f"cannot read the attempt's secret: {error}") from None
    return hmac.digest(secret, json.dumps([environ.get(name) for name in _OF_A_STORE]).encode(), "sha256")

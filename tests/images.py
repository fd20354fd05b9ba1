"""A real image for containers: Debian's Python with the torch of this environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.on_slurm import packages

PREPARED = Path(__file__).resolve().parents[1] / ".cluster"


def what_is_missing() -> str | None:
    """What keeps the image from being built."""
    if not (PREPARED / packages.IMAGE / "ready").exists():
        return "an image needs make cluster-deps"
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not (PREPARED / packages.IMAGE / "root/usr/bin" / own).exists():
        there = sorted(f"{major}.{minor}" for major, minor in packages.PYTHONS)
        return f"an image needs Debian's {own}: Debian has {', '.join(there)}, and .cluster/image one of them"
    return None


@contextmanager
def built(places: Collection[str] = ()) -> Iterator[Path]:
    """The folder of the image, next to the packages: its files are those of the environment, and take no space.

    Args:
        places: folders to make in it, which others can mount something on.
    """
    with tempfile.TemporaryDirectory(prefix="built-", dir=PREPARED / packages.IMAGE) as folder:
        root = Path(folder, "torch")
        link(PREPARED / packages.IMAGE / "root", root)
        Path(folder).chmod(0o755)
        installed = Path(sysconfig.get_path("purelib"))
        # where Debian's Python looks for what Debian has not installed
        place = root / "usr/local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "dist-packages"
        place.parent.mkdir(parents=True)
        link(installed, place)
        for own in {*place.glob("*mgpu_slurm*"), *place.glob("*.pth")}:
            shutil.rmtree(own) if own.is_dir() else own.unlink()
        for each in places:
            (root / each.lstrip("/")).mkdir(parents=True)
        yield root


def link(source: Path, target: Path) -> None:
    """Copies a folder with hard links to its files."""
    subprocess.run(["cp", "--archive", "--link", source, target], check=True)

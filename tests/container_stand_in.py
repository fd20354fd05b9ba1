"""Stand-ins for Apptainer and Pyxis, which take only the options that their manuals have.

They start the command in a namespace of its own with the mounts that they were given, but in the machine's own system
in place of the image: what is wrong with an option or a mount shows as it would with the real ones. A program that they
are to be is a script that calls this module: see `install`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

IMAGE = "image.sif"


def install(folder: Path, name: str, real: str = "") -> Path:
    """Puts the stand-in for `apptainer`, or a `srun` with Pyxis before the real one, into a folder for PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    words = shlex.join([sys.executable, __file__, name, real])
    # nodes may have another name for the folder
    program.write_text(f'#!/bin/sh\nexec {words} "$(dirname "$0")" "$@"\n')
    program.chmod(0o755)
    return folder


def said(folder: Path) -> list[str]:
    """The calls so far."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def apptainer(arguments: list[str]) -> list[str]:
    parser = argparse.ArgumentParser("apptainer", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("action", choices=["exec"])
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--pwd", default="/")
    parser.add_argument("--nv", action="store_true")
    parser.add_argument("--rocm", action="store_true")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    if not Path(given.image).exists():
        sys.exit(f"FATAL:   could not open image {given.image}: failed to retrieve path for {given.image}")
    # the image's, whatever the host has
    os.environ["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return in_namespace([*given.bind], given.pwd, given.command)


def srun_with_pyxis(arguments: list[str], real: str) -> list[str]:
    if "--help" in arguments:
        print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
        sys.exit(0)
    options = list(arguments)
    command = next(place for place, word in enumerate(options) if not word.startswith("-"))
    words, options = options[command:], options[:command]
    own = {name: value for name, _, value in (word.partition("=") for word in options) if "container" in name}
    unknown = own.keys() - {"--container-image", "--container-mounts", "--container-workdir"}
    if unknown:
        sys.exit(f"srun: unrecognized option '{unknown.pop()}'")
    if "--container-image" in own:
        mounts = [each for each in own.get("--container-mounts", "").split(",") if each]
        words = in_namespace(mounts, own.get("--container-workdir", "/"), words)
    return [real, *(word for word in options if "container" not in word), *words]


def in_namespace(mounts: list[str], workdir: str, command: list[str]) -> list[str]:
    """The command that starts another one with these mounts, `SOURCE:TARGET[:ro]`."""
    lines = []
    for each in mounts:
        source, target, *flags = each.split(":")
        if source != target:
            lines.append(f"mount --bind {shlex.quote(source)} {shlex.quote(target)}")
        if flags == ["ro"]:
            lines.append(f"mount --bind {shlex.quote(target)} {shlex.quote(target)}")
            lines.append(f"mount -o remount,bind,ro {shlex.quote(target)}")
    script = " && ".join([*lines, f"cd {shlex.quote(workdir)}", 'exec "$@"'])
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command]


def main(name: str, real: str, folder: str, *arguments: str) -> None:
    with Path(folder, "calls").open("a") as calls:
        calls.write(json.dumps(shlex.join(arguments)) + "\n")
    words = apptainer([*arguments]) if name == "apptainer" else srun_with_pyxis([*arguments], real)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(*sys.argv[1:])

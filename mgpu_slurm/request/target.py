"""Import a target by its name, with errors that state what is wrong and where."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mgpu_slurm.core import interpreter
from mgpu_slurm.core.errors import UserError, nearest
from mgpu_slurm.core.files import read_json
from mgpu_slurm.core.formatting import first_line
from mgpu_slurm.request import config as configs
from mgpu_slurm.request.job_function import JobFunction, from_callable
from mgpu_slurm.request.spec import Spec
from mgpu_slurm.run_folder.layout import RunFolder

DEFAULT_FUNCTION = "train"


def split(name: str) -> tuple[str, str]:
    """Return the module (dotted, or a path ending in .py) and the function of a target's name."""
    module, colon, function = name.partition(":")
    if not module or (colon and not function.isidentifier()):
        raise UserError(
            f"target {name!r}: expected package.module, package.module:function or path/to/file.py:function"
        )
    return module, function or DEFAULT_FUNCTION


def use_snapshot(workdir: Path) -> None:
    """Make `workdir` the working directory and the first place to import from."""
    os.chdir(workdir)
    if not interpreter.is_safe():
        # a batch script of v0.1 starts ranks with `python -m`, which puts the live project first: modules missing from
        # the snapshot must not be imported from there
        del sys.path[0]
    sys.path.insert(0, str(workdir))
    if (workdir / "src").is_dir():
        # the usual second location of packages; an editable installation would import them from the live folder
        sys.path.insert(1, str(workdir / "src"))
    package_home = str(Path(__file__).resolve().parents[2])
    if package_home not in sys.path:
        sys.path.append(package_home)


def load(name: str, workdir: Path) -> JobFunction:
    """Import a job function.

    Args:
        name: `package.module:function` or `path/to/file.py:function`, the path relative to `workdir`.
        workdir: the first folder on `sys.path`.

    Raises:
        UserError: unknown module or function, an import that fails (with its own error and line), or a function that
            cannot be called as one.
    """
    module_name, function_name = split(name)
    module = _import(module_name, workdir)
    function = getattr(module, function_name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise no_function(name, known)
    return from_callable(function, name)


def no_function(name: str, known: list[str]) -> UserError:
    """Return the error for a target whose module lacks the function, with the most similar function it has."""
    module, function = split(name)
    as_script = f"; a script runs as a command: -- python {module}" if module.endswith(".py") else ""
    return UserError(f"target {name!r}: {module} has no {function!r}{nearest(function, known)}{as_script}")


def attribute(name: str, workdir: Path) -> Any:
    """Return the object `package.module:name` or `path/to/file.py:name`.

    Raises:
        UserError: the module or name does not exist, or the import fails.
    """
    module_name, attribute_name = split(name)
    module = _import(module_name, workdir)
    if not hasattr(module, attribute_name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(f"{name!r}: {module_name} has no {attribute_name!r}{nearest(attribute_name, known)}")
    return getattr(module, attribute_name)


def _import(module_name: str, workdir: Path) -> ModuleType:
    if module_name.endswith(".py"):
        return _import_file(workdir / module_name, module_name)
    try:
        if importlib.util.find_spec(module_name) is None:
            raise ModuleNotFoundError(name=module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise import_failure(error, module_name, workdir) from error
        raise not_found(module_name, workdir) from None
    except Exception as error:
        raise import_failure(error, module_name, workdir) from error
    return _run_import(lambda: importlib.import_module(module_name), module_name, workdir)


def existing_file(path: Path, shown: str) -> Path:
    """Return the path of a target's file; raise UserError if it does not exist."""
    if not path.is_file():
        raise UserError(f"target: no file {shown!r} in the run's code (git-ignored files are not copied)")
    return path


def _import_file(path: Path, shown: str) -> ModuleType:
    existing_file(path, shown)
    # make siblings of the file importable, as with `python path/to/file.py`
    if str(path.parent) not in sys.path:
        sys.path.insert(1, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # pickle and multiprocessing look the module up by its name
    sys.modules[path.stem] = module
    loader = spec.loader

    def execute() -> ModuleType:
        loader.exec_module(module)
        return module

    return _run_import(execute, shown, path.parent)


def _run_import(execute: Callable[[], ModuleType], shown: str, folder: Path) -> ModuleType:
    try:
        return execute()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise import_failure(error, shown, folder) from error


def import_failure(error: BaseException, shown: str, folder: Path) -> UserError:
    """Return the error of a failed import in one line, with the user's file and line."""
    return UserError(f"target {shown!r} fails on import: {described_error(error, shown, folder)}")


def described_error(error: BaseException, shown: str, folder: Path) -> str:
    """Return `file:line: Error: message` for the innermost code below `folder` in an error's traceback."""
    said = first_line(str(error))
    if isinstance(error, SyntaxError) and error.filename:
        said = error.msg
        place = f"{_relative(error.filename, folder)}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
        frame = own[-1] if own else None
        place = f"{_relative(frame.filename, folder)}:{frame.lineno}" if frame else shown
    return f"{place}: {type(error).__name__}: {said}"


def _relative(filename: str, folder: Path) -> str:
    path = Path(filename)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else filename


def not_found(module_name: str, workdir: Path) -> UserError:
    """Return the error for a target whose module is not found."""
    file = workdir / Path(*module_name.split("."))
    if file.with_suffix(".py").is_file():
        name = f"{module_name.replace('.', '/')}.py"
        return UserError(f"target {module_name!r} cannot be imported from here: name the file, {name}")
    names = [path.stem for path in sorted(workdir.glob("*.py"))]
    names += [f"jobs.{path.stem}" for path in sorted(workdir.glob("jobs/[!_]*.py"))]
    return UserError(f"target {module_name!r}: there is no such module or file here{nearest(module_name, names)}")


# -- of a run


def job_function(spec: Spec, folder: RunFolder) -> JobFunction:
    """Return the run's job function, from the run's code snapshot."""
    if spec.target.function is None:
        return _unpickled(spec, folder)
    return load(spec.target.function, _use_snapshot(spec, folder))


def _use_snapshot(spec: Spec, folder: RunFolder) -> Path:
    """Make this process use the run's code snapshot, and return the working directory there."""
    workdir = folder.code / spec.workdir
    use_snapshot(workdir)
    sys.argv = [spec.target.label]
    return workdir


def _unpickled(spec: Spec, folder: RunFolder) -> JobFunction:
    """Load the job function from its pickle.

    Raises:
        UserError: the pickle belongs to another user, whose code would run when it is loaded, or holds bytecode of
            another Python.
    """
    _use_snapshot(spec, folder)
    import cloudpickle  # type: ignore[import-untyped]

    with open(folder.function, "rb") as file:
        # compare with the owner of this rank's log: a file server may map all files of a user to another owner
        owner = os.fstat(file.fileno()).st_uid
        if owner not in (os.geteuid(), os.fstat(1).st_uid):
            raise UserError(f"{str(folder.function)!r} belongs to user {owner}: submit the function yourself")
        data = file.read()
    _check_bytecode(data, folder)
    *loaded, types_of_fields = cloudpickle.loads(data)
    configs.resolve_classes(types_of_fields)
    if len(loaded) == 1:
        job: JobFunction = loaded[0]
        return job
    # v0.1 stored the function and one config, which was the same for all runs of a group
    function, config = loaded
    return JobFunction(spec.target.label, function, None if isinstance(config, dict) else type(config))


def _check_bytecode(pickled: bytes, folder: RunFolder) -> None:
    """
    Raises:
        UserError: the pickle holds bytecode of another Python, which this one may load, and then crash.
    """
    submitted, here = read_json(folder.environment), interpreter.python()["version"]
    there = here if submitted is None else submitted["python"]["version"]
    if b"CodeType" in pickled and interpreter.numbers(there)[:2] != interpreter.numbers(here)[:2]:
        raise UserError(
            f"the function of this run was pickled by Python {there}, and Python {here} cannot run it: use that one,"
            " or submit a function of a module"
        )

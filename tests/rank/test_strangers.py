"""Another user's process that reaches the rendezvous of a run: it becomes no rank, and nothing of its is executed."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from mgpu_slurm.core import torch_versions
from mgpu_slurm.core.errors import ForgeryError, MgpuError, TrialPruned, UserError
from mgpu_slurm.job import store_server
from mgpu_slurm.rank.communication import rendezvous
from mgpu_slurm.rank.communication.collectives import Collectives, SaveBarrier
from mgpu_slurm.rank.communication.control_group import ControlGroup
from mgpu_slurm.rank.communication.signed_store import SignedStore, signed
from mgpu_slurm.rank.communication.step_sync import GONE, Agreed, Call
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import Stop
from mgpu_slurm.rank.torch_adapter import connect_lazily, default_store
from mgpu_slurm.training.run import Run
from tests.forks import FORKS
from tests.ranks import join_ranks, run_ranks


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._marker,)


def play_rank_0(marker: Path, knows: str) -> None:
    """Comes before rank 0, answers as it would, and has the other rank unpickle something.

    Args:
        knows: what it has not forged, as if rank 0 had been faster there: nothing, or the greetings.
    """
    unsigned = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60))
    store = PrefixStore("mgpu", unsigned)
    greeting = PrefixStore("mgpu", signed(unsigned, 0)) if knows == "greetings" else store
    greeting.set("arrived/0", json.dumps(["n1", 2, None]))
    greeting.set("verdict", json.dumps(["", {}]))
    connect_lazily()
    dist.init_process_group("gloo", store=PrefixStore("default", store), rank=0, world_size=2)
    group = ControlGroup(RankInfo(0, 2, 0, 2), PrefixStore("mgpu_slurm 0", default_store()), None)
    group.broadcast(pickle.dumps(Evil(marker)))


def with_environ(environ: dict[str, str], marker: Path, knows: str) -> None:
    os.environ.update(environ)
    play_rank_0(marker, knows)


def is_told(facts: RankInfo, marker: Path, knows: str, has_secret: bool) -> Any:
    if not has_secret:
        del os.environ[store_server.SECRET_VARIABLE]
    stranger = FORKS.Process(target=with_environ, args=(dict(os.environ), marker, knows))
    stranger.start()
    try:
        rendezvous.join(facts, torch.device("cpu"), timeout=timedelta(seconds=60))
        return Collectives(facts).broadcast_from_rank0(lambda: None)
    finally:
        stranger.kill()
        stranger.join()


@pytest.mark.parametrize(("knows", "forged"), [("nothing", "mgpu/verdict"), ("greetings", "mgpu/default/")])
def test_unauthenticated_process_cannot_become_rank_0(tmp_path: Path, knows: str, forged: str) -> None:
    (answer,) = join_ranks(is_told, [RankInfo(1, 2, 1, 2)], tmp_path / "ran", knows, True)
    assert answer.startswith(f"ForgeryError: the rendezvous has a value of '{forged}"), answer
    assert not (tmp_path / "ran").exists()


def test_forged_message_is_not_unpickled_without_a_secret(tmp_path: Path) -> None:
    """A script that torchrun has started has no secret."""
    (answer,) = join_ranks(is_told, [RankInfo(1, 2, 1, 2)], tmp_path / "ran", "nothing", False)
    # of what it was sent: it has arrived
    assert "DecodeError" in answer, answer
    assert not (tmp_path / "ran").exists()


def fails(call: Callable[[], Any]) -> str:
    with pytest.raises(ForgeryError) as caught:
        call()
    return str(caught.value).split(" that ")[0]


def meets_forgeries(run: Run) -> list[str]:
    """What a run says to each kind of value that it takes from its store while it trains."""
    collectives = run._collectives
    if run.rank != 0:
        # it stays, and says nothing meanwhile
        dist.barrier()
        return []
    collectives._store.set("place", "")
    stranger = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    (prefix,) = [key.removesuffix("place") for key in stranger.list_keys() if key.endswith("/place")]
    barrier = collectives.save_barrier()
    barrier.done(7, is_lost=False)
    stranger.set(f"{prefix}saves 2/7/1", "written")
    stranger.set(f"{prefix}{GONE}", "1")
    # the server does not answer to `set`: it has made the values when it answers to this
    assert stranger.check([f"{prefix}{GONE}"])
    said = [fails(lambda: barrier.is_over(7)), fails(lambda: collectives._store.check([GONE]))]
    dist.barrier()
    return [text.replace(prefix, "") for text in said]


# it lists the store's keys
@pytest.mark.needs_torch("2.13")
def test_forged_store_values_are_rejected_during_training() -> None:
    names = ["saves 2/7/1", GONE]
    assert run_ranks(meets_forgeries, 2)[0] == [f"the rendezvous has a value of {name!r}" for name in names]


# -- what is signed


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    store_server.create_secret(tmp_path / "secret")
    return {store_server.SECRET_VARIABLE: str(tmp_path / "secret"), "MGPU_ATTEMPT": "1", "MASTER_PORT": "1234"}


def test_signed_value_is_valid_only_for_its_key_and_store(environ: dict[str, str]) -> None:
    raw = HashStore()
    store = signed(raw, 3, environ)
    store.set("name", b"value\0")
    assert store.get("name") == b"value\0"
    assert store.check(["name"])
    assert not store.check(["name", "none"])
    raw.set("nam", b"e" + raw.get("name"))
    raw.set("cut", raw.get("name")[:40])
    raw.set("other", raw.get("name"))
    for name in ("nam", "cut", "other"):
        with pytest.raises(ForgeryError, match=name):
            store.get(name)
    for change in ({"MGPU_ATTEMPT": "2"}, {"MASTER_PORT": "1235"}, {"MGPU_TRIAL_FOLDER": "/runs/study/trials/1"}):
        with pytest.raises(ForgeryError):
            signed(raw, 3, environ | change).get("name")
    # a rank of the same store reads it, also through prefixes and a connection of its own
    assert signed(raw, 0, environ).get("name") == b"value\0"
    torch_versions.waiting_client(PrefixStore("deep", store)).set("er", "x")
    reader = PrefixStore("deep", signed(raw, 1, environ))
    assert reader.get("er") == b"x"
    assert reader.num_keys() == raw.num_keys()
    assert reader.delete_key("er")
    assert reader.add("count", 2) == 2
    with pytest.raises(dist.DistStoreError):
        reader.wait(["er"], timedelta(seconds=0.1))


def test_store_is_signed_once_and_only_with_a_secret(environ: dict[str, str]) -> None:
    once = signed(HashStore(), 0, environ)
    assert isinstance(once, SignedStore)
    within = PrefixStore("a", PrefixStore("b", once))
    assert signed(within, 0, environ) is within
    plain = HashStore()
    assert signed(plain, 0, {}) is plain


def test_secret_file_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store_server.create_secret(tmp_path / "secret")
    finally:
        os.umask(before)
    first = (tmp_path / "secret").read_text()
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert len(first) == 64
    store_server.create_secret(tmp_path / "secret")
    assert (tmp_path / "secret").read_text() != first
    with pytest.raises(MgpuError, match=r"cannot read the attempt.s secret: .*nowhere"):
        store_server.key_of_store({store_server.SECRET_VARIABLE: str(tmp_path / "nowhere")})


def test_save_barrier_removes_its_keys() -> None:
    store = HashStore()
    barriers = [SaveBarrier(store, rank, 2) for rank in range(2)]
    for save in (1, 2):
        barriers[0].done(save, is_lost=False)
        assert not barriers[0].is_over(save)
        barriers[1].done(save, is_lost=save == 2)
        assert barriers[0].is_over(save)
        assert barriers[0].is_lost(save) is (save == 2)
        barriers[0].forget(save)
        assert store.num_keys() == 0


# -- what rank 0 tells

VALUES = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 2**63, -(2**90), True, 1, None]
TOLD = {"values": VALUES, "text": "é\0\n", "tuple": (1, [2.0, ("x",)]), 3: {None: frozenset({1})}, "empty": {}}


class OwnError(SystemExit):
    """Like those of sweeps."""


ERRORS = [UserError("bad\nvalue"), TrialPruned("no use"), OwnError("own"), KeyError("k"), OSError(28, "full")]


def raises(error: BaseException) -> Any:
    raise error


def hears(run: Run) -> list[str]:
    collectives = Collectives(RankInfo(run.rank, 2, run.rank, 2), [OwnError])
    found = [repr(collectives.broadcast_from_rank0(lambda: TOLD if run.rank == 0 else None))]
    for error in [*ERRORS, None]:
        try:
            # what no JSON can hold is an error too
            collectives.broadcast_from_rank0(lambda: raises(error) if error is not None else object())  # noqa: B023
        except BaseException as raised:
            found.append(f"{type(raised).__name__}: {getattr(raised, 'reason', raised)}")
    collectives.close()
    return found


def test_broadcast_from_rank_0_keeps_values_and_raises_errors() -> None:
    first, second = run_ranks(hears, 2)
    assert first[0] == second[0] == repr(TOLD)
    assert first[1:6] == [f"{type(each).__name__}: {getattr(each, 'reason', each)}" for each in ERRORS]
    assert second[1:6] == [*first[1:4], "MgpuError: KeyError: 'k'", "MgpuError: OSError: [Errno 28] full"]
    assert first[6] == second[6]
    assert first[6].startswith("UserError: what rank 0 tells is of type object")


def sums(run: Run) -> list[tuple[Agreed, str]]:
    collectives = run._collectives
    values = [[[1.0, 2.0**53], [0.1, 1.0]], [[math.inf, math.nan], [1.0, 1.0]], [[1e308, -1.0], [1e308, -1.0]]]
    requests = [Agreed(save=run.rank == 1), Agreed(stop=Stop.END if run.rank else Stop.REQUEUE), Agreed(failed=True)]
    found = []
    for request, each in zip(requests, values, strict=True):
        agreed, total = collectives.with_sums(Call.MEAN, request, each[run.rank])
        found.append((agreed, repr(total)))
    run.close()
    return found


def test_sums_use_double_precision_and_strongest_request_wins() -> None:
    first, second = run_ranks(sums, 2)
    assert first == second
    assert first == [
        (Agreed(save=True), repr([1.1, 2.0**53 + 1])),
        (Agreed(stop=Stop.END), repr([math.inf, math.nan])),
        (Agreed(failed=True), repr([math.inf, -2.0])),
    ]

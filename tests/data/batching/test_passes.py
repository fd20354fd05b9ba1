"""What a pass remembers of the batches that it has handed out."""

from __future__ import annotations

import torch

from mgpu_slurm.data.batching.batches import Share
from mgpu_slurm.data.batching.passes import HandedBatch, Pass


def test_freed_batch_stays_freed_if_its_id_is_reused() -> None:
    """Python reuses the id of an object once it is freed."""
    passing, share = Pass(0, False), Share(1, 2)
    first, second = torch.ones(1), torch.ones(1)
    gone, kept = (HandedBatch(number, share, samples, passing) for number, samples in enumerate((first, second)))
    gone.parts = dict.fromkeys(kept.parts, gone.parts[id(first)])
    del first
    for batch in (gone, kept):
        passing.hand_out(batch)
    passing.close()
    passing.tidy()
    assert passing.gone == {share}
    assert passing.unused() == [kept]

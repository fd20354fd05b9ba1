"""What a strategy needs of torch is imported only for it, because that takes about a second each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SLOW = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining")

SCRIPT = """
import sys
from pathlib import Path
import torch
from mgpu_slurm.rank.rank_info import RankInfo
from mgpu_slurm.rank.signals import StopFlag
from mgpu_slurm.training.run import Run

run = Run(RankInfo(), Path(sys.argv[1]), torch.device("cpu"), 1, StopFlag())
model = run.wrap(torch.nn.Linear(2, 1), blocks=(torch.nn.Linear,), plan={"": "column"})
pipe = run.pipeline([torch.nn.Linear(2, 1)], lambda outputs, targets: outputs.mean(), micro_batches=1)
run.restore(model=model, pipe=pipe)
run.backward(model(torch.ones(2, 2)).mean())
pipe.gradients(torch.ones(2, 2), torch.ones(2))
run.close()
print(" ".join(name for name in sys.argv[2:] if name in sys.modules))
"""


def test_plain_training_imports_nothing_of_the_other_strategies(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path, *SLOW], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr

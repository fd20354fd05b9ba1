"""`submit --profile` and `profile RUN`, as a user runs them; a run that is resumed records what it names anew."""

from __future__ import annotations

from tests.support import Project, log

TRAIN = """
    import torch
    from torch import nn
    from mgpu_slurm import attach

    def train(run, epochs: int = 2):
        model = run.wrap(nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(torch.utils.data.TensorDataset(torch.randn(20, 16)), batch_size=4)
        state = run.restore(model=model, optimizer=optimizer, data=data)
        for epoch in state.epochs(epochs):
            for (inputs,) in data:
                run.backward(model(inputs).square().mean())
                run.update(optimizer)
            run.report(epoch, loss=0.5)
            if epoch == 1 and run.attempt == 1:
                raise SystemExit(3)

    if __name__ == "__main__":
        train(attach())
"""


def test_recorded_steps_are_summarized_after_each_attempt(project: Project) -> None:
    project.write("train.py", TRAIN)
    folder, state = project.run("train.py", "--nodes", "2", "--profile", "2-4@all")
    assert state["state"] == "FAILED"
    recorded = project.json("profile", folder.name)
    assert (recorded["attempt"], [each["rank"] for each in recorded["ranks"]]) == (1, [0, 1])
    for each in recorded["ranks"]:
        assert (each["steps"], each["on_gpu"]) == (3, False)
        assert abs(each["computes"] + each["communicates"] + each["idle"] - 1) < 1e-9
        assert each["computes"] > 0
        assert each["communicates"] > 0
    assert "aten::addmm" in {each["name"] for each in recorded["operators"]}

    refused = project.call("resume", folder.name, "--profile", "4-5")
    assert refused.returncode == 2
    assert "the run has done 5 steps: name later ones, such as 15-18" in refused.stderr
    project.call("resume", folder.name, "--profile", "8-9@1", "--follow")
    shown = project.call("profile", folder.name).stdout
    assert f"profile   {folder.name}, attempt 2, 2 steps" in shown
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["1-0.json.gz", "1-1.json.gz", "2-1.json.gz"]
    assert "steps 8 to 9 were recorded" in log(folder, 1, attempt=2)


def test_script_that_attaches_is_recorded(project: Project) -> None:
    project.write("train.py", TRAIN.replace("raise SystemExit(3)", "pass"))
    folder, state = project.run("--profile", "2-3", "--", "python", "train.py")
    assert state["state"] == "COMPLETED"
    (trace,) = project.json("profile", folder.name)["ranks"]
    assert trace["steps"] == 2


def test_run_without_recorded_steps_says_how_to_record_them(project: Project) -> None:
    project.write("train.py", TRAIN)
    refused = project.call("submit", "train.py", "--profile", "4-2")
    assert (refused.returncode, "step 2 comes before step 4" in refused.stderr) == (2, True)
    assert not project.runs.exists()

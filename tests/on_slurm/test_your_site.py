"""The cluster file of "Your site in ten minutes": doctor approves it on a real SLURM."""

from __future__ import annotations

import json

from tests.on_slurm.cluster import REPOSITORY
from tests.on_slurm.users import User


def test_doctor_approves_the_file_of_the_page(student: User) -> None:
    page = (REPOSITORY / "docs/tutorials/your-site.md").read_text()
    student.write("mgpu.yaml", page.split("<!-- file: mgpu.yaml -->\n```yaml\n")[1].split("```")[0])
    done = student.call("doctor", "--json")
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, found
    assert found["cluster file"]["level"] == "ok"
    assert "mysite" in found["cluster file"]["text"]

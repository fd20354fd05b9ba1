"""The local executor fulfils the contract of executors."""

from __future__ import annotations

import pytest

from tests.executors.contract import ExecutorContract
from tests.support import Project


class TestLocalExecutor(ExecutorContract):
    name = "local"

    @pytest.fixture
    def place(self, project: Project) -> Project:
        return project

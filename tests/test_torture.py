import re
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="tests/torture.py forks")
def test_a_short_torture_of_every_kind_finds_nothing():
    command = [sys.executable, ROOT / "tests/torture.py", "--minutes=0.1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = re.findall(r"^(\w+): [1-9]\d* cases, 0 failures$", done.stdout, re.MULTILINE)
    assert kinds == ["mistakes", "shards", "checkpoint", "kill"]

"""The exercises: each fails with the program as it is, and the answer solves it."""

import os
import re
import shutil
import subprocess

import pytest

from harness import BUILD
from repository import QUICKLY, ROOT, make, number, numbered

BY_NUMBER = {str(number(program)): program
             for program in numbered(f"{ROOT}/scripts/exercises", ".patch")}
# Their checks seldom change, so a quick run takes one of them.
some_exercises = pytest.mark.parametrize("number,program", [
    pytest.param(*pair, marks=() if pair[1] == "4_hello" else pytest.mark.thorough)
    for pair in BY_NUMBER.items()], ids=BY_NUMBER)


@some_exercises
def test_not_solved_yet(build, number, program):
    """What fails are assertions, and not the test itself."""
    done = subprocess.run(
        ["scripts/exercises/run.sh", number, "-rf"], cwd=ROOT, text=True,
        env={**os.environ, "BUILD": build, "COLUMNS": "500"},
        capture_output=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.match("[0-9]+ failed", lines[-1])
    assert "error" not in lines[-1]
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed
    for line in failed:
        assert re.search(" - (assert|AssertionError)", line), line


@some_exercises
def test_answer(tmp_path, number, program):
    """As a reader would try it, in a copy of the repository, in a folder of whose
    tests it must not know."""
    (tmp_path / "conftest.py").write_text("raise OSError('of somebody else')\n")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(f"{ROOT}/Makefile", copy)
    for folder in ["src", "scripts"]:
        shutil.copytree(f"{ROOT}/{folder}", copy / folder)
    subprocess.run(["git", "apply", f"{ROOT}/scripts/exercises/{program}.patch"], cwd=copy,
                   check=True)
    # These are not built once more, because they are newer than the options.
    make("-C", str(copy), *QUICKLY, "CUDA_HOME=", "build/.flags")
    for built in "sender", "watch.so":
        shutil.copy(f"{ROOT}/{BUILD}/{built}", copy / "build")
    output = make("-C", str(copy), *QUICKLY, "CUDA_HOME=", f"exercise-{number}")
    assert "recorder.cpp" not in output
    assert re.search("^One run of it, watched:\nNo violation seen", output, re.M), output
    # Not everybody may have namespaces.
    assert re.search("^[0-9]+ passed(, [0-9]+ skipped)? in", output, re.M), output
    for line in (copy / "src" / f"{program}.cpp").read_text().splitlines():
        assert len(line) <= 80, line

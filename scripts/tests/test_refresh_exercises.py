"""scripts/refresh-exercises, in a small repository of its own."""

import subprocess

import pytest

from small_repository import PROGRAMS, Repository, replaced

# What the answers change in their programs.
ANSWERS = {"4_one": ("c", "c", "answer 4"), "5_two": ("f", "answer 5"),
           "10_three": ("added in 10", "answer 10")}
UNCHANGED = "4_one: unchanged\n5_two: unchanged\n10_three: unchanged\n"


def solved(program, lines):
    return replaced(lines, *ANSWERS[program])


@pytest.fixture
def repo(tmp_path):
    """One more commit, of an answer to each program's exercise."""
    repo = Repository(tmp_path)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "scripts/exercises").mkdir()
    for program, lines in PROGRAMS.items():
        patch_from(repo, program, solved(program, lines))
    repo.commit()
    return repo


def patch_from(repo, program, lines):
    """Makes a program's patch from an answer, and returns what that printed."""
    (repo.folder / "answer").write_text("\n".join(lines) + "\n")
    done = repo.run("refresh-exercises", program, "answer")
    (repo.folder / "answer").unlink()
    return done


def refresh(repo, *arguments):
    return repo.run("refresh-exercises", *arguments)


def patch(repo, program):
    return repo.folder / "scripts/exercises" / f"{program}.patch"


def answer(repo, program):
    """The program with its patch, which has to fit exactly."""
    before = repo.read(program)
    done = subprocess.run(
        ["git", "apply", "-v", patch(repo, program)], cwd=repo.folder,
        text=True, check=True, capture_output=True)
    assert "offset" not in done.stderr
    lines = repo.read(program)
    repo.write(program, before)
    return lines


def test_from_an_answer(repo):
    for program, lines in PROGRAMS.items():
        assert answer(repo, program) == solved(program, lines)
    lines = replaced(PROGRAMS["5_two"], "g", "another answer", "g")
    assert patch_from(repo, "5_two", lines) == (
        0, "5_two: 1 lines added, 0 removed\n", "")
    assert answer(repo, "5_two") == lines
    assert patch(repo, "5_two").read_text().startswith(
        "--- a/src/5_two.cpp\n+++ b/src/5_two.cpp\n@@")


def test_nothing_to_do(repo):
    assert refresh(repo) == (0, UNCHANGED, "")


def test_all(repo):
    """A change in all programs, above the answers, is carried into each; once that
    is done, nothing is left to do."""
    for program in PROGRAMS:
        repo.replace(program, "a", "a", "new")
    assert refresh(repo) == (
        0, "4_one: 1 lines added, 0 removed\n"
           "5_two: 1 lines added, 1 removed\n"
           "10_three: 1 lines added, 1 removed\n", "")
    for program, lines in PROGRAMS.items():
        assert answer(repo, program) == solved(
            program, replaced(lines, "a", "a", "new"))
    assert refresh(repo) == (0, UNCHANGED, "")


def test_offset(repo):
    """A patch that git would apply somewhere else does not fit."""
    lines = ["a"] * 20
    repo.write("4_one", PROGRAMS["4_one"] + lines)
    repo.write("5_two", lines + PROGRAMS["5_two"])
    assert refresh(repo)[:2] == (
        0, "4_one: unchanged\n5_two: 1 lines added, 1 removed\n"
           "10_three: unchanged\n")
    assert answer(repo, "5_two") == lines + solved("5_two", PROGRAMS["5_two"])


def test_own(repo):
    """A patch that makes a program of a copy gets the changes of the original, also
    while the copy is there."""
    own = repo.folder / "scripts/own/mine.patch"
    own.parent.mkdir()
    own.write_text("--- a/src/4_one.cpp\n")
    mine = replaced(PROGRAMS["4_one"], "c", "c", "mine")
    repo.write("mine", mine)
    assert refresh(repo, "mine", "src/mine.cpp") == (
        0, "mine: 1 lines added, 0 removed\n", "")
    assert refresh(repo) == (0, UNCHANGED + "mine: unchanged\n", "")
    repo.commit()
    repo.replace("4_one", "a", "a", "new")
    assert refresh(repo)[:2] == (
        0, "4_one: 1 lines added, 0 removed\n5_two: unchanged\n10_three: unchanged\n"
           "mine: 1 lines added, 0 removed\n")
    repo.path("mine").unlink()
    subprocess.run(["git", "apply", own], cwd=repo.folder, check=True)
    assert repo.read("mine") == replaced(mine, "a", "a", "new")
    assert repo.read("4_one") == replaced(PROGRAMS["4_one"], "a", "a", "new")


def test_own_of_own(repo):
    """So does one that makes a program of what another one makes."""
    for name, before in ("mine", "4_one"), ("more", "mine"):
        own = repo.folder / f"scripts/own/{name}.patch"
        own.parent.mkdir(exist_ok=True)
        own.write_text(f"--- a/src/{before}.cpp\n")
    mine = replaced(PROGRAMS["4_one"], "c", "c", "mine")
    repo.write("answer", mine)
    assert refresh(repo, "mine", "src/answer.cpp")[0] == 0
    repo.write("answer", replaced(mine, "mine", "mine", "more"))
    assert refresh(repo, "more", "src/answer.cpp") == (
        0, "more: 1 lines added, 0 removed\n", "")
    repo.path("answer").unlink()
    repo.commit()
    repo.replace("4_one", "a", "a", "new")
    status, output, error = refresh(repo)
    assert (status, error) == (0, "")
    assert "more: 1 lines added, 0 removed\n" in output
    for name in "mine", "more":
        subprocess.run(["git", "apply", f"scripts/own/{name}.patch"], cwd=repo.folder,
                       check=True)
    assert repo.read("more") == replaced(
        replaced(mine, "mine", "mine", "more"), "a", "a", "new")


def test_since_a_commit(repo):
    """A change that has been committed, with the answers as they were."""
    repo.replace("5_two", "d", "D")
    repo.commit()
    status, output, error = refresh(repo)
    assert (status, output) == (1, "4_one: unchanged\n10_three: unchanged\n")
    assert "error: 5_two: its answer does not fit at HEAD either" in error
    assert refresh(repo, "HEAD~1")[0] == 0
    assert answer(repo, "5_two") == solved(
        "5_two", replaced(PROGRAMS["5_two"], "d", "D"))


def test_conflict(repo):
    """The other answers are made; this one is left for us to resolve, and not
    touched again until its patch has been made."""
    repo.replace("4_one", "a", "a", "new")
    repo.replace("5_two", "f", "F")  # which the answer replaces, too
    before = patch(repo, "5_two").read_text()
    status, output, error = refresh(repo)
    assert (status, output) == (1, "4_one: 1 lines added, 0 removed\n"
                                   "10_three: unchanged\n")
    merged = repo.folder / "build/exercises/5_two.cpp"
    lines = merged.read_text().splitlines()
    first = lines.index("<<<<<<< answer")
    last = lines.index(">>>>>>> src/5_two.cpp")
    assert lines[first + 1] == "answer 5" and lines[last - 1] == "F"
    go_on = "scripts/refresh-exercises 5_two build/exercises/5_two.cpp"
    assert f"build/exercises/5_two.cpp:{first + 1}: conflict\n" in error
    assert go_on in error
    assert patch(repo, "5_two").read_text() == before

    # With markers, no patch is made of it.
    status, output, error = repo.run(*go_on.split("/", 1)[1].split())
    assert (status, output) == (1, "") and "resolve this first" in error
    assert patch(repo, "5_two").read_text() == before

    resolved = lines[:first] + ["F, and answer 5"] + lines[last + 1:]
    merged.write_text("\n".join(resolved) + "\n")
    status, output, error = refresh(repo)
    assert status == 1 and go_on in error and "4_one: unchanged" in output
    assert merged.read_text().splitlines() == resolved
    assert repo.run(*go_on.split("/", 1)[1].split()) == (
        0, "5_two: 1 lines added, 1 removed\n", "")
    assert answer(repo, "5_two") == resolved
    assert not merged.exists()
    assert refresh(repo) == (0, UNCHANGED, "")


def test_unresolved_program(repo):
    """A program with conflicts of its own does not get into an answer."""
    repo.replace("4_one", "a", "<<<<<<< 4_one", "a")
    before = patch(repo, "4_one").read_text()
    for arguments in [[], ["4_one", "src/4_one.cpp"]]:
        status, output, error = refresh(repo, *arguments)
        assert (status, output) == (1, "")
        assert "src/4_one.cpp:2: conflict\n" in error
    assert patch(repo, "4_one").read_text() == before


def test_program_is_no_answer(repo):
    before = patch(repo, "4_one").read_text()
    status, _, error = refresh(repo, "4_one", "src/4_one.cpp")
    assert status == 1 and "not an answer" in error
    assert patch(repo, "4_one").read_text() == before


@pytest.mark.parametrize("arguments", [
    ["no-such-commit"], ["4_one", "no-such-file"], ["6_four", "src/4_one.cpp"],
    ["HEAD", "4_one", "src/4_one.cpp"]])
def test_usage(repo, arguments):
    status, output, error = refresh(repo, *arguments)
    assert (status, output) == (2, "")
    assert "usage: scripts/refresh-exercises [REV]" in error

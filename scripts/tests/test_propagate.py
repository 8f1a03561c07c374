"""scripts/propagate, in a small repository of its own."""

import pytest

from small_repository import PROGRAMS, Repository, replaced


@pytest.fixture
def repo(tmp_path):
    return Repository(tmp_path)


def propagate(repo, *arguments):
    return repo.run("propagate", *arguments)


def expected(program, **changes):
    """The lines of a program, those named changed into others."""
    return [changes.get(line, line) for line in PROGRAMS[program]]


def test_all(repo):
    """Into all that come from it, in the order of their numbers; what each added
    stays."""
    repo.replace("4_one", "b", "B")
    assert propagate(repo) == (
        0, "5_two: 1 lines added, 1 removed\n"
           "10_three: 1 lines added, 1 removed\n", "")
    for program in PROGRAMS:
        assert repo.read(program) == expected(program, b="B")


def test_added_and_removed(repo):
    repo.replace("4_one", "a", "a", "new 1", "new 2")
    repo.replace("4_one", "e")
    assert propagate(repo)[0] == 0
    for program in PROGRAMS:
        lines = [line for line in PROGRAMS[program] if line != "e"]
        assert repo.read(program) == lines[:2] + ["new 1", "new 2"] + lines[2:]


def test_from_the_middle(repo):
    """The one before the first change stays as it is."""
    repo.replace("5_two", "e", "E")
    assert propagate(repo) == (0, "10_three: 1 lines added, 1 removed\n", "")
    assert repo.read("4_one") == PROGRAMS["4_one"]
    assert repo.read("10_three") == expected("10_three", e="E")


def test_again(repo):
    """A change that is there already is not made twice."""
    repo.replace("4_one", "b", "B", "B2")
    assert propagate(repo)[0] == 0
    before = {program: repo.read(program) for program in PROGRAMS}
    assert before["10_three"] != PROGRAMS["10_three"]
    assert propagate(repo) == (0, "5_two: unchanged\n10_three: unchanged\n",
                                "")
    assert {program: repo.read(program) for program in PROGRAMS} == before


def test_nothing_to_do(repo):
    assert propagate(repo) == (0, "no program differs from HEAD\n", "")


def test_since_a_commit(repo):
    """A change that has been committed, where it was made."""
    repo.replace("4_one", "b", "B")
    repo.commit()
    assert propagate(repo, "4_one")[1] == ("5_two: unchanged\n"
                                          "10_three: unchanged\n")
    assert propagate(repo, "4_one", "HEAD~1")[0] == 0
    for program in PROGRAMS:
        assert repo.read(program) == expected(program, b="B")


def test_own_changes_stay(repo):
    """What is not committed of a later program is not lost, and goes on from
    there."""
    repo.replace("4_one", "b", "B")
    repo.replace("5_two", "added in 5", "changed in 5")
    repo.replace("10_three", "end of 10", "the end")
    assert propagate(repo)[0] == 0
    changes = {"b": "B", "added in 5": "changed in 5"}
    assert repo.read("5_two") == expected("5_two", **changes)
    assert repo.read("10_three") == expected(
        "10_three", **changes, **{"end of 10": "the end"})


def test_new_program(repo):
    """One that REV does not know yet takes part, and passes it on."""
    last = PROGRAMS["10_three"][:-1]
    repo.write("11_new", ["// Based on 10_three."] + last[1:])
    repo.write("12_new", ["// Based on 11_new."] + last[1:] + ["new in 12"])
    repo.replace("4_one", "b", "B")
    assert propagate(repo)[0] == 0
    lines = ["B" if line == "b" else line for line in last[1:]]
    assert repo.read("11_new")[1:] == lines
    assert repo.read("12_new")[1:] == lines + ["new in 12"]


@pytest.fixture
def tree(repo):
    """Two more programs: 11_four comes from 5_two, as 10_three does, and 12_five
    from 11_four."""
    lines = PROGRAMS["5_two"][1:-1]
    repo.write("11_four", ["// Based on 5_two."] + lines + ["end of 11"])
    repo.write("12_five", ["// Based on 11_four."] + lines + ["end of 12"])
    repo.commit()
    return repo


def test_tree(tree):
    """A change goes from a parent to its children, whatever lies between their
    numbers."""
    tree.replace("4_one", "b", "B")
    assert propagate(tree) == (
        0, "".join(f"{program}: 1 lines added, 1 removed\n" for program in
                   ["5_two", "10_three", "11_four", "12_five"]), "")
    for program in ["10_three", "11_four", "12_five"]:
        assert tree.read(program)[1:3] == ["a", "B"]


def test_later_parent(tree):
    """A parent may have the higher number. Its turn comes first all the same."""
    tree.write("6_six", ["// Based on 12_five."] + tree.read("12_five")[1:-1] + ["end of 6"])
    tree.commit()
    tree.replace("4_one", "b", "B")
    assert propagate(tree) == (
        0, "".join(f"{program}: 1 lines added, 1 removed\n" for program in
                   ["5_two", "10_three", "11_four", "12_five", "6_six"]), "")
    assert tree.read("6_six")[2] == "B"


def test_siblings(tree):
    """What changes in a program concerns none but those that come from it."""
    tree.replace("10_three", "b", "B")
    assert propagate(tree) == (0, "", "")
    tree.replace("11_four", "e", "E")
    assert propagate(tree) == (0, "12_five: 1 lines added, 1 removed\n", "")
    assert propagate(tree, "10_three") == (0, "", "")
    assert tree.read("12_five")[1:-1] == tree.read("11_four")[1:-1]
    assert tree.read("10_three")[1:3] == ["a", "B"]


def test_conflict_in_one_branch(tree):
    """It stops there, and nowhere else. Once it is resolved, what comes from there
    gets the change, too."""
    for program in ["11_four", "12_five"]:
        tree.replace(program, "b", "own b")
    tree.commit()
    lines = tree.read("11_four")
    tree.replace("5_two", "b", "B")
    status, output, error = propagate(tree)
    assert (status, output) == (1, "10_three: 1 lines added, 1 removed\n")
    assert "go on: scripts/propagate 11_four HEAD\n" in error
    assert tree.read("10_three")[2] == "B" and tree.read("12_five")[2] == "own b"
    # As long as it is not resolved, the others still get what changes.
    tree.replace("5_two", "e", "E")
    status, output, error = propagate(tree)
    assert (status, output) == (1, "10_three: 1 lines added, 1 removed\n")
    assert "src/11_four.cpp:3: conflict\n" in error
    assert "go on: scripts/propagate 11_four HEAD\n" in error
    assert tree.read("12_five")[2] == "own b" and "e" in tree.read("12_five")
    assert propagate(tree, "10_three") == (0, "", "")
    tree.replace("5_two", "E", "e")
    assert propagate(tree)[0] == 1
    tree.write("11_four", replaced(lines, "own b", "B, and own b"))
    assert propagate(tree, "11_four", "HEAD") == (
        0, "12_five: 1 lines added, 1 removed\n", "")
    assert tree.read("12_five")[2] == "B, and own b"


def test_another_parent(tree):
    """A program that has been moved to another parent gets the changes of that."""
    tree.replace("12_five", "// Based on 11_four.", "// Based on 10_three.")
    tree.replace("10_three", "b", "B")
    tree.replace("11_four", "e", "E")
    assert propagate(tree, "11_four") == (0, "", "")
    assert propagate(tree) == (0, "12_five: 1 lines added, 1 removed\n", "")
    assert tree.read("12_five")[2] == "B"


@pytest.mark.parametrize("line,message", [
    ("// no parent", "src/5_two.cpp names no parent"),
    ("// Based on 6_none.", "based on 6_none: there is no such program"),
    ("// Based on mine.", "based on mine, which is not a program of the tutorial"),
    ("// Based on 10_three.", "based on 10_three, which is based on it"),
    ("// Based on 5_two.", "based on 5_two, which is based on it")])
def test_no_parent(repo, line, message):
    """Nothing is changed before all parents are known."""
    repo.write("mine", ["// Based on 4_one."])
    repo.replace("5_two", "// Based on 4_one.", line)
    repo.replace("4_one", "b", "B")
    before = {program: repo.read(program) for program in PROGRAMS}
    status, output, error = propagate(repo)
    assert status == 1 and not output and message in error
    assert {program: repo.read(program) for program in PROGRAMS} == before


def test_conflict(repo):
    """It stops there, says where, and leaves the later ones alone. Once it is
    resolved, it goes on from there."""
    repo.replace("4_one", "b", "B")
    repo.replace("4_one", "c", "c", "new in 4")  # where 5_two has its own line
    status, _, error = propagate(repo)
    assert status == 1
    marker = [i for i, line in enumerate(repo.read("5_two"), 1)
              if line.startswith("<<<<<<< 5_two")]
    assert len(marker) == 1
    assert f"src/5_two.cpp:{marker[0]}: conflict\n" in error
    assert "go on: scripts/propagate 5_two HEAD\n" in error
    assert repo.read("10_three") == PROGRAMS["10_three"]

    # As long as it is not resolved, nothing is done, wherever it starts.
    present = repo.read("5_two")
    for arguments in [[], ["5_two"]]:
        status, output, error = propagate(repo, *arguments)
        assert status == 1 and not output
        assert f"src/5_two.cpp:{marker[0]}: conflict\n" in error
    assert repo.read("5_two") == present
    assert repo.read("10_three") == PROGRAMS["10_three"]

    resolved = ["B" if line == "b" else line for line in PROGRAMS["5_two"]]
    resolved.insert(resolved.index("added in 5"), "new in 4")
    repo.write("5_two", resolved)
    assert propagate(repo, "5_two", "HEAD") == (
        0, "10_three: 2 lines added, 1 removed\n", "")
    assert repo.read("5_two") == resolved
    lines = expected("10_three", b="B")
    lines.insert(lines.index("added in 5"), "new in 4")
    assert repo.read("10_three") == lines


@pytest.mark.parametrize("arguments", [
    ["6_four"], ["4_one.cpp"], ["4_one", "no-such-commit"],
    ["4_one", "HEAD", "HEAD"]])
def test_usage(repo, arguments):
    repo.replace("4_one", "b", "B")
    status, output, error = propagate(repo, *arguments)
    assert status == 2 and not output
    assert "usage: scripts/propagate [PROGRAM [REV]]" in error
    assert repo.read("5_two") == PROGRAMS["5_two"]

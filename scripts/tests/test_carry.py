"""scripts/carry.py: all texts of this repository in its weave, and changes of every kind
in a small one."""

import pytest

import carry
import moves
from marks import nothing_wrong
from small_repository import FIRST, HEAD, LAST, PROGRAMS, Repository, replaced, with_moves


@pytest.mark.static
def test_weave():
    """Each patch fits, to the letter: where an offset is left to git, it is wrong once another
    place looks alike. And the weave makes each text of this repository, byte for byte."""
    nothing_wrong(carry.check())


def run(repo, *arguments):
    return repo.run("carry.py", *arguments)


# ---- Programs ----

@pytest.fixture
def repo(tmp_path):
    """11_four is based on 5_two, as 10_three is, and 12_five on 11_four."""
    repo = Repository(tmp_path)
    lines = PROGRAMS["5_two"][1:-1]
    repo.write("11_four", ["// Based on 5_two."] + lines + ["end of 11"])
    repo.write("12_five", ["// Based on 11_four."] + lines + ["end of 12"])
    repo.commit()
    return repo


def test_down(repo):
    """Into all below; what each added stays. It is not made twice. Somebody's own program
    is left alone, also if it is half done."""
    repo.path("mine").write_text("// Based on 4_one.\nint main() {\n  b(\n")
    repo.replace("4_one", "b", "B", "B2")
    repo.replace("4_one", "f")
    for _ in range(2):
        assert run(repo)[::2] == (0, "")
        for program, lines in PROGRAMS.items():
            assert repo.read(program) == replaced(
                [line for line in lines if line != "f"], "b", "B", "B2")
        assert repo.read("12_five")[1:4] == ["a", "B", "B2"]
    assert "  b(" in repo.read("mine")


def test_from_the_middle(repo):
    """What is above, and what is beside it, doesn't get it."""
    repo.replace("11_four", "e", "E")
    assert run(repo) == (0, "src/12_five.cpp\n", "")
    assert repo.read("5_two") == PROGRAMS["5_two"]


def test_what_is_not_sure(repo):
    """Where a program has other lines, it is left out, and named, with all that comes from
    there. Once somebody has decided, it goes on from there, and is not asked for again."""
    for program in "11_four", "12_five":
        repo.replace(program, "b", "own b")
    repo.commit()
    repo.replace("4_one", "b", "B")
    status, output, _ = run(repo)
    assert status == 1 and "4_one:\n    -b\n    +B\n  LOOK, left out" in output
    assert output.endswith("look at src/11_four.cpp\n")
    assert repo.read("10_three")[2] == "B" and repo.read("12_five")[2] == "own b"
    repo.replace("11_four", "own b", "B, and own b")
    assert run(repo)[0] == 0 and repo.read("12_five")[2] == "B, and own b"


def test_beside_own_lines(repo):
    """It is put in, and named. So is what is done in a similar line."""
    repo.replace("4_one", "c", "c", "new in 4")
    status, output, _ = run(repo)
    assert status == 0 and "put in beside lines of its own, look: 5_two\n" in output
    assert {"new in 4", "added in 5"} < {*repo.read("12_five")}


# ---- What patches make of them ----

@pytest.fixture
def tree(tmp_path):
    """5_two has two moves; the first one has a break, the second one an answer, and one's
    own program, of which there is another."""
    tree = with_moves(tmp_path)
    put(tree, "breaks/5.1", FIRST.replace("2 * number", "0"))
    put(tree, "exercises/5_two", LAST.replace("Twice(1)", "Twice(7)"))
    put(tree, "own/mine", LAST.replace("i < 2", "i < 20"), "5_two")
    put(tree, "own/more", LAST.replace("i < 2", "i < 30"), "own/mine")
    tree.commit()
    return tree


def put(repo, node, text, *parent):
    (repo.folder / "text").write_text(text)
    status, output, error = run(repo, "write", node, "text", *parent)
    assert status == 0 and ".patch: " in output, error


def text(repo, node):
    return run(repo, "state", node)[1]


def edit(repo, program, old, new):
    before = repo.path(program).read_text()
    assert old in before
    repo.path(program).write_text(before.replace(old, new))


def test_all_follow(tree):
    """A line, and a name, also where it is a text's own. Heads stay."""
    edit(tree, "4_one", "from + 1", "from + 3")
    edit(tree, "5_two", "Twice", "Double")
    status, output, _ = run(tree)
    assert status == 0 and "5_two: Twice is Double now\n" in output
    for node, was in {"5_two": LAST, "5.1": FIRST, "breaks/5.1": FIRST.replace("2 * number", "0"),
                      "exercises/5_two": LAST.replace("Twice(1)", "Twice(7)"),
                      "own/more": LAST.replace("i < 2", "i < 30")}.items():
        assert text(tree, node) == was.replace("Twice", "Double").replace("+ 1", "+ 3")
    assert moves.check("5_two", tree.folder) == [] and carry.check(tree.folder) == []
    assert moves.head("5_two", 1, tree.folder) == HEAD


def test_not_in_a_move_yet(tree):
    """A new line waits for the move that has its neighbours, unless it is needed."""
    edit(tree, "5_two", "  int result", "  // Why.\n  int result")
    edit(tree, "5_two", "from + 1", "from + kMore")
    edit(tree, "5_two", "// Based on 4_one.\n", "// Based on 4_one.\nint kMore = 1;\n")
    assert run(tree)[0] == 0
    assert text(tree, "5.1") == FIRST.replace("from + 1", "from + kMore").replace(
        "// Based on 4_one.\n", "// Based on 4_one.\nint kMore = 1;\n")


def test_look(tree):
    """What is unsure in a patch's text is left in a file, from which its patch is made."""
    edit(tree, "5_two", "Count(Twice(1))", "Count(2, Twice(1) + 2)")
    edit(tree, "5_two", "Count(int from)", "Count(int more, int from)")
    status, output, _ = run(tree)
    path = "build/carry/exercises_5_two.cpp"
    assert status == 1
    assert f"look at {path}, then: scripts/carry.py write exercises/5_two" in output
    edit(tree, f"../{path[:-4]}", "Count(Twice(7))", "Count(2, Twice(7) + 2)")
    assert run(tree, "write", "exercises/5_two", path)[0] == 0
    assert run(tree)[0] == 0 and "+ 2" in text(tree, "exercises/5_two")

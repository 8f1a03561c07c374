"""scripts/carry.py: all texts of this repository in its weave, and changes of every kind
in a small one."""

import shutil

import pytest

import carry
import moves
from marks import nothing_wrong
from repository import ROOT
from small_repository import PROGRAMS, Repository, replaced
from test_moves import FIRST, HEAD, LAST, PARENT
from test_own_programs import OWN


@pytest.mark.static
def test_weave():
    """Each patch fits, and the weave makes each text of this repository, byte for byte."""
    nothing_wrong(carry.check())


def run(repo, *arguments):
    return repo.run("carry.py", *arguments)


def expected(program, **changes):
    return [changes.get(line, line) for line in PROGRAMS[program]]


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
    for name, text in OWN.items():
        repo.path(name).write_text(text)
    repo.replace("4_one", "b", "B", "B2")
    repo.replace("4_one", "f")
    for _ in range(2):
        assert run(repo)[::2] == (0, "")
        for program in PROGRAMS:
            lines = [line for line in expected(program, b="B") if line != "f"]
            assert repo.read(program) == replaced(lines, "B", "B", "B2")
        assert repo.read("12_five")[1:4] == ["a", "B", "B2"]
    assert all(repo.path(name).read_text() == text for name, text in OWN.items())


def test_from_the_middle(repo):
    """What is above, and what is beside it, doesn't get it."""
    repo.replace("11_four", "e", "E")
    assert run(repo) == (0, "src/12_five.cpp\n", "")
    assert repo.read("12_five")[1:-1] == repo.read("11_four")[1:-1]
    assert repo.read("5_two") == PROGRAMS["5_two"]


def test_since_a_commit(repo):
    repo.replace("4_one", "b", "B")
    repo.commit()
    assert run(repo) == (0, "", "")
    assert run(repo, "--since", "HEAD~1")[0] == 0
    assert repo.read("12_five")[2] == "B"


def test_what_is_not_sure(repo):
    """Where a program has other lines, it is left out, and named, with all that comes from
    there. Once somebody has decided, it goes on from there, and is not asked for again."""
    for program in "11_four", "12_five":
        repo.replace(program, "b", "own b")
    repo.commit()
    repo.replace("4_one", "b", "B")
    status, output, _ = run(repo)
    assert status == 1 and "4_one:\n    -b\n    +B\n  LOOK, left out" in output
    assert output.endswith(": 11_four\nsrc/5_two.cpp\nsrc/10_three.cpp\nlook at "
                           "src/11_four.cpp\n")
    assert repo.read("10_three")[2] == "B"
    assert repo.read("11_four")[2] == repo.read("12_five")[2] == "own b"
    repo.replace("11_four", "own b", "B, and own b")
    status, output, _ = run(repo)
    assert status == 0 and "left as somebody has changed it by hand: 11_four" in output
    assert repo.read("12_five")[2] == "B, and own b"


def test_beside_own_lines(repo):
    """It is put in, and named."""
    repo.replace("4_one", "c", "c", "new in 4")
    status, output, _ = run(repo)
    assert status == 0 and "put in beside lines of its own, look: 5_two\n" in output
    for program in "5_two", "12_five":
        assert {"new in 4", "added in 5"} < {*repo.read(program)}


def test_similar_line(repo):
    repo.replace("4_one", "g", 'puts("Hello");')
    for program in "5_two", "10_three", "11_four", "12_five":
        repo.replace(program, "g", '  puts("Hello", two);')
    repo.commit()
    repo.replace("4_one", 'puts("Hello");', 'puts("Good day");')
    status, output, _ = run(repo)
    assert status == 0 and "done in a similar line, look: 5_two\n" in output
    for program in "5_two", "10_three", "12_five":
        assert '  puts("Good day", two);' in repo.read(program)


@pytest.mark.skipif(not shutil.which("clang-format"), reason="it has no clang-format")
def test_column_of_comments(repo):
    """Lines that differ only in the blanks before their comments are the same one."""
    shutil.copy(f"{ROOT}/.clang-format", repo.folder)
    for program in "10_three", "11_four", "12_five":
        repo.path(program).unlink()
    for program, size in ("4_one", "8;"), ("5_two", "8'000'000;"):
        name = "// Based on 4_one." if program == "5_two" else "// 4_one"
        blanks = " " * (len(size) - 2)
        repo.write(program, [name, f"int a = 1;{blanks}  // of a", f"int b = {size}  // of b"])
    repo.commit()
    repo.replace("4_one", "int a = 1;  // of a", "int a = 12;  // of a")
    assert run(repo)[0] == 0
    assert repo.read("4_one")[1:] == ["int a = 12;  // of a", "int b = 8;   // of b"]
    assert repo.read("5_two")[1:] == ["int a = 12;         // of a",
                                      "int b = 8'000'000;  // of b"]


@pytest.mark.parametrize("line,message", [
    ("// no parent", "src/5_two.cpp names no parent"),
    ("// Based on 6_none.", "based on 6_none: there is no such program"),
    ("// Based on 10_three.", "based on 10_three, which is based on it")])
def test_no_parent(repo, line, message):
    repo.replace("5_two", "// Based on 4_one.", line)
    repo.replace("4_one", "b", "B")
    assert message in run(repo)[2] and repo.read("10_three") == PROGRAMS["10_three"]


# ---- What patches make of them ----

@pytest.fixture
def tree(repo):
    """5_two has two moves; the first one has a break, the second one an answer, and one's
    own program, of which there is another."""
    for program in "10_three", "11_four", "12_five":
        repo.path(program).unlink()
    for file, text in {"src/4_one.cpp": PARENT, "src/5_two.cpp": LAST, "1_twice.cpp": FIRST,
                       "1_twice.head": HEAD, "2_loop.cpp": LAST, "2_loop.head": "Loop.\n"
                       }.items():
        (repo.folder / file).write_text(text)
    assert repo.run("moves/moves.py", "write", "5_two", "1_twice.cpp", "2_loop.cpp")[0] == 0
    put(repo, "breaks/5.1", FIRST.replace("2 * number", "0"))
    put(repo, "exercises/5_two", LAST.replace("Twice(1)", "Twice(7)"))
    put(repo, "own/mine", LAST.replace("i < 2", "i < 20"), "5_two")
    put(repo, "own/more", LAST.replace("i < 2", "i < 30"), "own/mine")
    repo.commit()
    return repo


def put(repo, node, text, *parent):
    (repo.folder / "text").write_text(text)
    status, output, error = run(repo, "write", node, "text", *parent)
    assert status == 0 and ".patch: " in output, error


def text(repo, node):
    return run(repo, "state", node)[1]


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
    before = tree.git("diff")
    assert run(tree)[0] == 0 and tree.git("diff") == before


def test_not_in_a_move_yet(tree):
    """A new line waits for the move that has its neighbours, unless it is needed."""
    edit(tree, "5_two", "  int result", "  // Why.\n  int result")
    edit(tree, "5_two", "from + 1", "from + kMore")
    edit(tree, "5_two", "// Based on 4_one.\n", "// Based on 4_one.\nint kMore = 1;\n")
    assert run(tree)[0] == 0
    assert text(tree, "5.1") == FIRST.replace("from + 1", "from + kMore").replace(
        "// Based on 4_one.\n", "// Based on 4_one.\nint kMore = 1;\n")


def test_block_stands_elsewhere(tree):
    """It is not put in twice where somebody has put it beside other lines."""
    block = "int Half(int number) {\n  return number / 2;\n}\n"
    edit(tree, "4_one", "int main", f"{block}\nint main")
    edit(tree, "5_two", "int Twice", f"{block}\nint Twice")
    assert run(tree)[0] == 0
    assert all(text(tree, node).count(block) == 1 for node in ["5.1", "5_two", "own/more"])


def test_change_of_a_move(tree):
    """It goes on below, but not up."""
    put(tree, "scripts/moves/5_two/1_twice.patch",
        FIRST.replace("Only in", "Gone after").replace("from + 1", "from + 5"))
    assert run(tree)[0] == 0
    assert "from + 5" in tree.path("5_two").read_text() and "+ 5" in text(tree, "breaks/5.1")
    assert text(tree, "5_two") == LAST.replace("from + 1", "from + 5")
    assert tree.path("4_one").read_text() == PARENT


def test_look(tree):
    """What is unsure in a patch's text is left in a file, from which its patch is made."""
    edit(tree, "5_two", "Count(Twice(1))", "Count(2, Twice(1) + 2)")
    edit(tree, "5_two", "Count(int from)", "Count(int more, int from)")
    status, output, _ = run(tree)
    path = "build/carry/exercises_5_two.cpp"
    assert status == 1 and f"look at {path}, then: scripts/carry.py write exercises/5_two" in output
    edit(tree, f"../{path[:-4]}", "Count(Twice(7))", "Count(2, Twice(7) + 2)")
    assert run(tree, "write", "exercises/5_two", path)[0] == 0
    assert not (tree.folder / path).exists() and "+ 2" in text(tree, "exercises/5_two")
    assert run(tree)[0] == 0


@pytest.mark.parametrize("arguments,message", [
    (["write", "5_two", "src/4_one.cpp"], "5_two is a file: edit src/5_two.cpp"),
    (["write", "own/new", "src/5_two.cpp", "5_two"], "is what 5_two is already"),
    (["write", "own/new", "none", "5_two"], "No such file"),
    (["state", "5.3"], "there is no 5.3"), (["--since", "none"], "there is no commit none")])
def test_usage(tree, arguments, message):
    status, output, error = run(tree, *arguments)
    assert status == 1 and not output and message in error


def edit(repo, program, old, new):
    before = repo.path(program).read_text()
    assert old in before
    repo.path(program).write_text(before.replace(old, new))

"""A small repository, in which tests run the tools that change programs."""

import shutil
import subprocess

import moves
from repository import ROOT

# As in src: each adds something to the one that it is based on.
PROGRAMS = {
    "4_one": ["// 4_one", "a", "b", "c", "d", "e", "f", "g", "end of 4"],
    "5_two": ["// Based on 4_one.", "a", "b", "c", "added in 5", "d", "e", "f", "g",
              "end of 5"],
    "10_three": ["// Based on 5_two.", "a", "b", "c", "added in 5", "d", "e", "f",
                 "added in 10", "g", "end of 10"],
}


class Repository:
    """One commit of these programs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "src").mkdir()
        (folder / "scripts/moves").mkdir(parents=True)
        for tool in ["common.sh", "carry.py", "moves/moves.py"]:
            shutil.copy(f"{ROOT}/scripts/{tool}", folder / "scripts" / tool)
        for program, lines in PROGRAMS.items():
            self.write(program, lines)
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments):
        return subprocess.run(
            ["git", "-c", "user.name=test", "-c", "user.email=test", *arguments],
            cwd=self.folder, check=True, capture_output=True).stdout

    def commit(self):
        self.git("add", ".")
        self.git("commit", "-q", "-m", "test")

    def path(self, program):
        return self.folder / "src" / f"{program}.cpp"

    def read(self, program):
        return self.path(program).read_text().splitlines()

    def write(self, program, lines):
        self.path(program).write_text("\n".join(lines) + "\n")

    def replace(self, program, old, *new):
        """Puts these lines where there was that one."""
        self.write(program, replaced(self.read(program), old, *new))

    def run(self, tool, *arguments):
        """Returns the exit status, what it printed, and its errors."""
        done = subprocess.run([f"scripts/{tool}", *arguments], cwd=self.folder,
                              text=True, check=False, capture_output=True)
        return done.returncode, done.stdout, done.stderr


# A program, its move and the next program, with the head of the move.
PARENT = """\
// 4_one
int Count(int from) {
  return from + 1;
}

int main() {
  return Count(1);
}
"""
FIRST = """\
// Based on 4_one.
int Count(int from) {
  return from + 1;
}

// Only in this move.
int Twice(int number) {
  return 2 * number;
}

int main() {
  return Count(Twice(1));
}
"""
LAST = """\
// Based on 4_one.
int Count(int from) {
  return from + 1;
}

int Twice(int number) {
  int result = 2;
  result *= number;
  return result;
}

int main() {
  for (int i = 0; i < 2; ++i) {
    if (Count(i) == 0) return 0;
  }
  return Count(Twice(1));
}
"""
HEAD = "Twice: a function.\n\nCures: nothing doubles.\nTry:   ./build/5.1\nWrong: all.\n\n"


def with_moves(folder):
    """One whose 5_two has two moves."""
    repo = Repository(folder)
    repo.path("10_three").unlink()
    for file, text in {"src/4_one.cpp": PARENT, "src/5_two.cpp": LAST, "1_twice.cpp": FIRST,
                       "1_twice.head": HEAD, "2_loop.cpp": LAST,
                       "2_loop.head": "Loop: again.\n\nCures: that.\n"}.items():
        (folder / file).write_text(text)
    assert repo.run("moves/moves.py", "write", "5_two", "1_twice.cpp", "2_loop.cpp") == (0, "", "")
    repo.commit()
    return repo


# ---- One with a chapter ----

# A step of two moves. The second one removes a line of the first, and indents one of the
# parent's.
STATES = ["""\
// The first one.
int one() {
  return 1;
}
""", """\
// Based on 4_one.
int one() {
  return 1;
}
int slow() {
  return one();
}
""", """\
// Based on 4_one.
int one() {
  if (fast()) {
    return 1;
  }
  return 2;
}
int fast() {
  return one();
}
"""]
CHAPTER = """\
# 5. Two

[Before](4_one.md), [program](../src/5_two.cpp): `fast`, `make diff-5` and `make diff-5.2`

| move | lines |
| --- | --- |
| 5.1 slow | +4 −1 |
| [5.2 fast](#52-a-fast-one) | +4 −1 |

```cpp
int fast() {
```

## 5.1 A slow one

`slow` and `one`.

```cpp
int slow() {
  return one();
```

## 5.2 A fast one

`fast` and `slow`.

```diff
-int slow() {
+int fast() {
   return one();
```

### In it

```cpp
  if (fast()) {
    // ...
  }
  // ...
}
```

## What you have now

```cpp
  return 2;
```
"""


def write_moves(folder):
    """Writes these programs, their chapters, and the moves."""
    for name, text in {
            "README.md": "[4](chapters/4_one.md) [5](chapters/5_two.md)\n",
            "chapters/4_one.md": "# 4. One\n\n[Program](../src/4_one.cpp)\n",
            "chapters/5_two.md": CHAPTER, "src/4_one.cpp": STATES[0],
            "src/5_two.cpp": STATES[-1]}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "scripts").mkdir()
    shutil.copy(f"{ROOT}/scripts/common.sh", folder / "scripts")
    moves.write("5_two", {"1_slow": STATES[1], "2_fast": STATES[2]},
                {"1_slow": "Slow: one more.\n\n", "2_fast": "Fast: it asks.\n\n"}, folder)


def replaced(lines, old, *new):
    """The lines, with these where there was that one."""
    i = lines.index(old)
    return lines[:i] + list(new) + lines[i + 1:]

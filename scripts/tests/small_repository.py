"""A small repository, in which tests run the tools that change programs."""

import shutil
import subprocess

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
        for tool in ["common.sh", "propagate", "refresh-exercises", "moves/moves.py"]:
            shutil.copy(f"{ROOT}/scripts/{tool}", folder / "scripts" / tool)
        for program, lines in PROGRAMS.items():
            self.write(program, lines)
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments):
        subprocess.run(["git", "-c", "user.name=test", "-c", "user.email=test",
                        *arguments], cwd=self.folder, check=True,
                       capture_output=True)

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


def replaced(lines, old, *new):
    """The lines, with these where there was that one."""
    i = lines.index(old)
    return lines[:i] + list(new) + lines[i + 1:]

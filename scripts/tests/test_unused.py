"""No program carries what it does not use: functions, members, constants and values
of enumerations. Compilers do not tell, because another source might use them; so this
looks into clang's syntax tree of each program."""

import json
import re
import shutil
import subprocess

import pytest

from harness import PROGRAMS
from repository import ROOT

pytestmark = pytest.mark.skipif(shutil.which("clang++") is None,
                                reason="clang++ is not here")

DECLARATIONS = ["FunctionDecl", "CXXMethodDecl", "FieldDecl", "EnumConstantDecl",
                "VarDecl"]
# Compilers tell of local variables.
OUTSIDE_OF_FUNCTIONS = ["NamespaceDecl", "CXXRecordDecl"]
COPIES = ["CXXConstructorDecl", "CXXMethodDecl"]
# Members that are used without their names: what each message begins with, and what
# libfabric wants each operation to begin with.
USED_BY_PLACE = r"\b(AppMessageBase|fi_context2)$"


def syntax_tree(folder, text):
    """Clang's, of the program and not of the headers: for that, the program gets a
    namespace, which begins with the first line of code. Returns the source, too."""
    start = re.search(r"(?m)^[^\s#/]", text).start()
    path = folder / "program.cpp"
    # In the same line, so that all lines keep their numbers.
    path.write_text(f"{text[:start]}namespace the_program {{ {text[start:]}}}\n")
    tree = subprocess.run(
        ["clang++", "-std=c++20", "-fsyntax-only", "-Xclang", "-ast-dump=json",
         "-Xclang", "-ast-dump-filter=the_program", path],
        check=True, text=True, stdout=subprocess.PIPE).stdout
    return json.JSONDecoder().raw_decode(tree)[0], path.read_text()


class References:
    """What each declaration of a program refers to. One is known by its name and its
    place: the instances of a template have those of the template."""

    def __init__(self, tree):
        self.kinds = {}
        self.ids = {}
        self.found = []
        self._walk(tree, None, None)

    def _walk(self, node, owner, parent):
        # What the compiler adds to copy an object refers to every member.
        if node.get("isImplicit") and node["kind"] in COPIES:
            return
        children = node.get("inner", [])
        if self._is_declaration(node, parent):
            place = node["name"], node["loc"]["offset"]
            # A function may have been declared before.
            owner = self.ids.get(node.get("previousDecl"), place)
            self.ids[node["id"]] = owner
            self.kinds.setdefault(owner, node["kind"])
            if node["name"] == "main" or any(
                    child.get("kind") == "UnusedAttr" for child in children):
                self.found.append((None, node["id"]))
        referred = [node.get("referencedDecl"), node.get("foundReferencedDecl"),
                    {"id": node.get("referencedMemberDecl")},
                    *node.get("lookups", [])]
        self.found += [(owner, other["id"]) for other in referred if other]
        for child in children:
            self._walk(child, owner, node.get("kind"))

    @staticmethod
    def _is_declaration(node, parent):
        return (node.get("kind") in DECLARATIONS and node.get("name")
                and "offset" in node["loc"] and not node.get("isImplicit")
                and (node["kind"] != "VarDecl" or parent in OUTSIDE_OF_FUNCTIONS)
                # The library calls these, which the tree of the program lacks.
                and not node["name"].startswith("operator")
                and not re.search(USED_BY_PLACE, node["type"]["qualType"]))

    def unused(self):
        """What neither main() uses, nor anything that it uses."""
        by_owner = {}
        for owner, id_ in self.found:
            by_owner.setdefault(owner, set()).add(self.ids.get(id_))
        used, new = set(), [None]
        while new:
            more = by_owner.get(new.pop(), set()) - used - {None}
            used |= more
            new += more
        return [place for place in self.kinds if place not in used]


def unused(folder, text):
    """The names that a program declares and does not use, with their lines."""
    tree, text = syntax_tree(folder, text)
    references = References(tree)
    # The tree does not show names in the bounds of an array and in offsetof.
    code = re.sub(r"//.*", "", text)
    return [f"{name} in line {text.count(chr(10), 0, at) + 1}"
            for name, at in references.unused()
            if (references.kinds[name, at] != "VarDecl"
                or len(re.findall(rf"\b{name}\b", code)) == 1)
            and not re.search(rf"\boffsetof\(\w+, {name}\)", code)]


@pytest.mark.static
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(tmp_path, program):
    with open(f"{ROOT}/src/{program}.cpp") as file:
        found = unused(tmp_path, file.read())
    assert not found, f"src/{program}.cpp does not use " + ", ".join(found)


GOOD = """\
#include <rdma/fabric.h>

#include <vector>
#ifdef USE_CUDA
#include <cuda_runtime.h>
#endif

constexpr int kBound = 3;
constexpr int kValue = 4;

enum class Kind : uint32_t {
  kFirst = 1,
  kSecond,
};

struct AppMessageBase {
  Kind type;
};

struct AppMessage {
  AppMessageBase base;
  [[maybe_unused]] int padding = 0;
  int size;
};

struct Operation {
  fi_context2 context;  // has to come first
  AppMessageBase base;
};

int Later(int n);

template <typename T>
struct Owned {
  T* object = nullptr;
  ~Owned() { Close(); }
  void Close() { delete object; }
  T* operator->() { return object; }
};

struct Client {
  int numbers[kBound] = {};
  std::vector<int> more;
  int Sum() { return numbers[0] + (more.empty() ? Later(2) : more[0]); }
};

template <typename T>
T Read(const std::vector<char>& bytes) {
  T message = {};
  if (bytes.size() < sizeof(message)) message.base.type = Kind::kSecond;
  return message;
}

int Later(int n) { return n > 0 ? Later(n - 1) : kValue; }

int main() {
  Owned<Client> client{new Client};
  auto message = Read<AppMessage>({});
  auto get = [&] { return client->Sum(); };
  return message.base.type == Kind::kFirst ? message.size : get();
}
"""


# What nothing uses, behind such a text.
FAULTS = {
    "int Later(int n);": "\nint Never();",
    "kBound = 3;": "\nint Count(int n) { return Count(n); }",
    "kValue = 4;": "  // kOther\nconstexpr int kOther = 5;",
    "  int size;": "\n  int spare = 0;",
    "struct Client {": "\n  static constexpr int kMost = 3;\n  int size = 0;",
    "  void Close() { delete object; }": "\n  void Open() {}",
    "  kSecond,": "\n  kThird,",
    ": kValue; }\n": "\ntemplate <typename T>\nT Zero() { return {}; }\n"
                     "int Inner() { return 1; }\nint Outer() { return Inner(); }\n",
}


def test_finds(tmp_path):
    """It, also if something unused uses it, and nothing else."""
    assert unused(tmp_path, GOOD) == []
    text = GOOD
    for place, fault in FAULTS.items():
        assert text.count(place) == 1
        text = text.replace(place, place + fault)
    assert {name.split(" ")[0] for name in unused(tmp_path, text)} == {
        "Never", "Count", "kOther", "spare", "kMost", "size", "Open", "kThird", "Zero", "Inner",
        "Outer"}

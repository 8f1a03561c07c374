"""No program carries what it does not use: functions, members, constants and values of
enumerations. Compilers do not tell, because another source might use them."""

import re

import pytest

from repository import programs, read_source

# A function, a member or a variable, an enumerator, as clang-format writes them.
DECLARATIONS = [r"^ *(?:[\w:<>,*&~]+ )+[*&]?(\w+)\([^;]*\{$",
                r"^ *(?:[\w:<>,*&()]+ )+[*&]?(\w+)(?:\[\w+\])?(?: = [^;]*|\{[^;]*\})?;$",
                r"^ +(k\w+)(?: = \w+)?,$"]


def unused(source):
    """The names that are declared, and occur nowhere else. `return true;` looks like one."""
    code = re.sub(r"//.*", "", source)
    code = re.sub(r" +$", "", code, flags=re.M)
    declared = {name for pattern in DECLARATIONS for name in re.findall(pattern, code, re.M)}
    return sorted(name for name in declared - {"main", "true", "false"}
                  if len(re.findall(rf"\b{name}\b", code)) == 1)


@pytest.mark.static
@pytest.mark.parametrize("program", programs())
@pytest.mark.every_program
def test_program(program):
    assert unused(read_source(program)) == []


@pytest.mark.static
def test_finds():
    assert unused("""\
constexpr int kBound = 3;  // kBound
enum class Kind {
  kFirst = 1,
};
struct Client {
  int numbers[kBound] = {};
  std::vector<int> more;
  int Sum(int n) const {
    return n;
  }
};
int main() { return Client().numbers[0] == int(Kind::kFirst); }
""") == ["Sum", "more"]

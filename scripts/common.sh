# What several scripts need. They source it; it is not run by itself.

# The scripts call make as if from a terminal. The variables of the make that
# called them still count, because make puts those into the environment, too.
unset MAKEFLAGS MAKELEVEL MFLAGS

# Prints a command, then runs it.
run() {  # COMMAND...
  echo "+ $*"
  "$@"
}

# Prints the first python3 in PATH that has all of these modules: a python3 in
# front of the distribution's own does not see the packages that we install.
python_with() {  # MODULE...
  local python
  # Otherwise bash may name only the python3 that it remembers.
  hash -r
  for python in $(type -aP python3); do
    if "$python" -c "$(printf 'import %s\n' "$@")" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  echo "error: no python3 in PATH has: $*; scripts/install-deps.sh --help names the" \
    "group of packages that installs it" >&2
  return 1
}

# Prints the programs of the tutorial, in their order. A program with another name is
# somebody's own, and none of the tools touches it.
programs() {
  ls src | sed -n 's/\.cpp$//p' | grep -E '^[0-9]+_' | sort -V
}

# Prints the program that this one is based on, as its source says near the top;
# nothing for the first program, and for one without libfabric. Fails if the source does not say it, or names a program
# that is not there, is somebody's own, or is itself based on this one.
parent() {  # PROGRAM
  local program=$1 parent first
  parent=$(named_parent "$program") || return
  first=$(programs | head -n 1)
  if [ -z "$parent" ]; then
    [ "$program" != "$first" ] && ! is_apart "$program" || return 0
    echo "error: src/$program.cpp names no parent; one of its first 15 lines" \
      "has to be like: // Based on 7_queue." >&2
  elif [ ! -f "src/$parent.cpp" ]; then
    echo "error: src/$program.cpp is based on $parent: there is no such program" >&2
  elif [[ $program =~ ^[0-9]+_ ]] && ! [[ $parent =~ ^[0-9]+_ ]]; then
    echo "error: src/$program.cpp is based on $parent, which is not a program of the" \
      "tutorial" >&2
  elif comes_from "$parent" "$program"; then
    echo "error: src/$program.cpp is based on $parent, which is based on it" >&2
  else
    echo "$parent"
    return
  fi
  return 1
}

# Succeeds if a program does without libfabric, so that it shares nothing with others.
is_apart() {  # PROGRAM
  grep -q '^#include <infiniband/verbs.h>' "src/$1.cpp"
}

# Prints the parent that a program names.
named_parent() {  # PROGRAM
  sed -En '1,15s|.*// Based on (\w+)[.:].*|\1|p' "src/$1.cpp"
}

# Succeeds if a program is this ancestor, or comes from it.
comes_from() {  # PROGRAM ANCESTOR
  local program=$1 seen=" "
  while [ -f "src/$program.cpp" ] && [[ $seen != *" $program "* ]]; do
    [ "$program" != "$2" ] || return 0
    seen+="$program "
    program=$(named_parent "$program")
  done
  return 1
}

# Succeeds if the sides of a program are peers, as those of 15_ring: its usage says so.
peers() {  # PROGRAM
  grep -qs 'FOLDER RANK N' "src/$(basename "$1").cpp"
}

# Runs a command that starts many programs. Whenever one of them starts, the verbs
# provider of libfabric 1.17 reads all symbols of the kernel, twice, which is a quarter
# of all the work of the tests. So root hides them, from this command alone.
without_symbols() {  # COMMAND...
  local hide="mount --bind /dev/null /proc/kallsyms"
  if unshare -m bash -c "$hide" 2>/dev/null; then
    unshare -m bash -c "$hide"' && exec "$@"' bash "$@"
  else
    "$@"
  fi
}

# Whenever a program starts, two libraries that Debian's libfabric 1.17 brings, for the
# adapters of InfiniPath and Omni-Path, measure the clock of the first core for 0.1 s
# each, and wake up some hundred times for that: a fifth of all the work of the tests.
# Makes others in FOLDER, for LD_LIBRARY_PATH, where a PROGRAM needs them and there is
# no such adapter. They say what those would: there is none.
stand_in_for_psm() {  # FOLDER PROGRAM
  local libraries library functions
  rm -rf "$1"
  libraries=$(ldd "$2")
  grep -q libpsm <<<"$libraries" || return 0
  if compgen -G '/dev/ipath*' || compgen -G '/dev/hfi1*'; then return; fi >/dev/null
  # What libfabric calls: "psm_init", or "psm2_init@PSM2_1.0" with a version.
  functions=$(nm -D --undefined-only \
    "$(sed -n 's|.*libfabric.* => \(.*\) (.*|\1|p' <<<"$libraries")" |
    grep -oE '\bpsm2?_\w+') || return 0
  for library in $(grep -oE '^\s*libpsm(_infinipath|2)\.so\S+' <<<"$libraries"); do
    mkdir -p "$1"
    sed 's|.*|int &() { return 0; }|' <<<"$functions" |
      ${CXX:-g++} -x c - -w -shared -fPIC -o "$1/$library" -Wl,-soname,"$library" \
        -Wl,--version-script,<(echo 'PSM2_1.0 { *; };')
  done
  # If it has become another version, there is nothing to gain.
  LD_LIBRARY_PATH=$1 "$2" --help >/dev/null 2>&1 || rm -rf "$1"
}

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
  echo "error: no python3 in PATH has: $*; scripts/install-deps.sh installs it" >&2
  return 1
}

# Prints the path of the browser that draws the figures.
browser() {
  command -v "${PUPPETEER_EXECUTABLE_PATH:-chromium}" ||
    command -v chromium-browser
}

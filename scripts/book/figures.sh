#!/bin/bash
# Draws each Mermaid figure of the chapters in a browser, as GitHub does, into
# build/figures/CHAPTER-1.png and so on. Fails if Mermaid reports an error, and names
# its chapter and line.
#
# Usage: scripts/book/figures.sh [--keep DIR | --book | --list] [CHAPTER...]
# CHAPTER is each of chapters/*.md, if none is named.
#   --keep DIR  also copies the figures to DIR
#   --book      draws them for `make book` instead: as build/figures/book/HASH-light.svg
#               and HASH-dark.svg. HASH is that of the figure's text, so that only what
#               has changed is drawn again
#   --list      says what --book would install, and does nothing
set -euo pipefail

# The tool that drives the browser, and Mermaid itself. Newer versions (from 12 on)
# need a newer node than Debian 12 has.
packages=(@mermaid-js/mermaid-cli@11.12.0 puppeteer@23.11.1 mermaid@11.12.2)

usage() {
  echo "usage: $0 [--keep DIR | --book | --list] [CHAPTER...]" >&2
  exit 2
}

keep=
book=
list=
if [ "${1:-}" = --book ] || [ "${1:-}" = --list ]; then
  book=yes
  [ "$1" = --book ] || list=yes
  shift
elif [ "${1:-}" = --keep ]; then
  [ $# -ge 2 ] || usage
  mkdir -p "$2"
  keep=$(realpath "$2")
  shift 2
fi
[[ ${1:-} != -* ]] || usage
# Names on the command line are relative to the folder that we were called in.
chapters=()
for chapter in "$@"; do
  [ -f "$chapter" ] || usage
  chapters+=("$(realpath "$chapter")")
done
cd "$(dirname "$0")/../.."
. scripts/common.sh
[ ${#chapters[@]} -gt 0 ] || chapters=(chapters/*.md ${book:+scripts/README.md})

dir=build/figures
mkdir -p "$dir/book"

# Prints the line of each ```mermaid, and writes the figure to PREFIX-N.mmd.
split() {  # CHAPTER PREFIX
  awk -v prefix="$2" '
    /^ *```/ && file { close(file); file = ""; next }
    /^ *```mermaid *$/ { file = prefix "-" ++n ".mmd"; print NR
                         printf "" >file; next }
    file { print >file }
    END { if (file) exit 1 }' "$1"
}

# Prints the name that the book has for a figure.
book_name() {  # MMD
  sha256sum "$1" | cut -c1-16
}

if [ -n "$book" ]; then
  # What is there already is not drawn again, and then nothing has to be installed.
  todo=$(mktemp -d)
  trap 'rm -rf "$todo"' EXIT
  for chapter in "${chapters[@]}"; do
    split "$chapter" "$todo/$(basename "$chapter" .md)" >/dev/null
  done
  missing=()
  for figure in "$todo"/*.mmd; do
    [ -e "$figure" ] || continue
    [ -s "$dir/book/$(book_name "$figure")-dark.svg" ] || missing+=("$figure")
  done
  [ ${#missing[@]} -gt 0 ] || exit 0
  if [ -n "$list" ]; then
    system=$(scripts/install-deps.sh --list figures)
    [ -z "$system" ] || echo "to draw ${#missing[@]} figures: $system"
    [ "${packages[*]}" = "$(cat "$dir/.installed" 2>/dev/null)" ] ||
      echo "to draw ${#missing[@]} figures, from npm, into $dir: ${packages[*]}, with" \
        "all that these need: about 270 packages, 350 MB"
    exit
  fi
  echo "drawing ${#missing[@]} figures in a browser, once"
else
  rm -f "$dir"/*.png "$dir"/*.mmd
fi

scripts/install-deps.sh figures

# No package runs code while it is being installed, and none downloads a browser.
if [ "${packages[*]}" != "$(cat "$dir/.installed" 2>/dev/null)" ]; then
  rm -rf "$dir/node_modules"
  run env PUPPETEER_SKIP_DOWNLOAD=1 npm install --prefix "$dir" --no-save \
    --no-package-lock --ignore-scripts --no-audit --no-fund "${packages[@]}"
  echo "${packages[*]}" >"$dir/.installed"
fi

# The browser's sandbox does not work for root, and the browser has no reason to
# contact anybody.
sandbox=
[ "$(id -u)" -ne 0 ] || sandbox='"--no-sandbox", '
cat >"$dir/browser.json" <<END
{
  "executablePath": "$(browser)",
  "args": [$sandbox"--disable-background-networking", "--disable-sync",
           "--disable-component-update", "--no-first-run"]
}
END

if [ -n "$book" ]; then
  # Metrics are alike for these fonts, so that text fits where it is read, too.
  font='"fontFamily": "Arial, Liberation Sans, Helvetica, sans-serif"'
  cat >"$todo/light.json" <<END
{"theme": "base", $font, "themeVariables": {"background": "#ffffff",
 "primaryColor": "#eef3f9", "primaryBorderColor": "#8aa0bb", "lineColor": "#51627a",
 "primaryTextColor": "#1d2530", "noteBkgColor": "#fdf4d3", "noteBorderColor": "#d3bf74",
 "noteTextColor": "#1d2530", "edgeLabelBackground": "#ffffff"}}
END
  cat >"$todo/dark.json" <<END
{"theme": "base", $font, "themeVariables": {"darkMode": true, "background": "#14181e",
 "primaryColor": "#232c38", "primaryBorderColor": "#5f7692", "lineColor": "#9fb0c6",
 "primaryTextColor": "#dfe5ec", "noteBkgColor": "#39331c", "noteBorderColor": "#857639",
 "noteTextColor": "#eee6cc", "edgeLabelBackground": "#14181e"}}
END
  # All of them in one page, because starting the browser takes longest.
  for figure in "${missing[@]}"; do
    printf '```mermaid\n%s\n```\n\n' "$(cat "$figure")"
  done >"$todo/all.md"
  for theme in light dark; do
    timeout 300 "$dir/node_modules/.bin/mmdc" -q -i "$todo/all.md" \
      -o "$todo/$theme.md" -e svg -b transparent -c "$todo/$theme.json" \
      -p "$dir/browser.json"
  done
  for i in "${!missing[@]}"; do
    name=$(book_name "${missing[i]}")
    for theme in light dark; do
      mv "$todo/$theme-$((i + 1)).svg" "$dir/book/$name-$theme.svg"
    done
  done
  exit
fi

failed=0
count=0
for chapter in "${chapters[@]}"; do
  name=$(basename "$chapter" .md)
  lines=$(split "$chapter" "$dir/$name") || {
    echo "$chapter: error: the last figure does not end" >&2
    failed=1
  }
  n=0
  for line in $lines; do
    n=$((n + 1))
    figure=$dir/$name-$n
    if said=$(timeout 120 "$dir/node_modules/.bin/mmdc" -q -i "$figure.mmd" \
      -o "$figure.png" -b white -s 2 -p "$dir/browser.json" 2>&1) &&
      [ -s "$figure.png" ]; then
      count=$((count + 1))
      echo "$chapter:$line: $figure.png"
      [ -z "$keep" ] || cp "$figure.png" "$keep"
    else
      # Mermaid counts from the line after ```mermaid.
      if [[ $said =~ [Oo]n\ line\ ([0-9]+) ]]; then
        line=$((line + BASH_REMATCH[1]))
      fi
      # Leaves out the places in Mermaid's own code.
      printf '%s:%s: error in figure %s:\n%s\n' "$chapter" "$line" "$n" \
        "$(grep -v -e '^$' -e '^ *at ' -e node_modules <<<"$said")" >&2
      failed=1
    fi
  done
done
echo "$count figures drawn"
exit "$failed"

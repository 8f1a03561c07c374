#!/bin/bash
# Draws each Mermaid figure of the chapters in a browser, as GitHub does, into
# build/figures/CHAPTER-1.png and so on. Fails if Mermaid reports an error, and names
# its chapter and line.
#
# Usage: scripts/book/figures.sh [CHAPTER...]     (make figures; chapters/*.md)
set -euo pipefail

# The tool that drives the browser, and Mermaid itself. Newer versions (from 12 on)
# need a newer node than Debian 12 has.
packages=(@mermaid-js/mermaid-cli@11.12.0 puppeteer@23.11.1 mermaid@11.12.2)

cd "$(dirname "$0")/../.."
. scripts/common.sh
[ $# -gt 0 ] || set -- chapters/*.md

dir=build/figures
mkdir -p "$dir"

# Prints the line of each ```mermaid, and writes the figure to PREFIX-N.mmd.
split() {  # CHAPTER PREFIX
  awk -v prefix="$2" '
    /^ *```/ && file { close(file); file = ""; next }
    /^ *```mermaid *$/ { file = prefix "-" ++n ".mmd"; print NR
                         printf "" >file; next }
    file { print >file }' "$1"
}

rm -f "$dir"/*.png "$dir"/*.mmd
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

failed=0
count=0
for chapter; do
  name=$(basename "$chapter" .md)
  lines=$(split "$chapter" "$dir/$name")
  n=0
  for line in $lines; do
    n=$((n + 1))
    figure=$dir/$name-$n
    if said=$(timeout 120 "$dir/node_modules/.bin/mmdc" -q -i "$figure.mmd" \
      -o "$figure.png" -b white -s 2 -p "$dir/browser.json" 2>&1) &&
      [ -s "$figure.png" ]; then
      count=$((count + 1))
      echo "$chapter:$line: $figure.png"
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

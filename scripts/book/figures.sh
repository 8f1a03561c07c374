#!/bin/bash
# Draws each Mermaid figure of the chapters in a browser, as GitHub does, into
# build/figures/CHAPTER-1.png and so on. Fails if Mermaid reports an error.
#
# Usage: scripts/book/figures.sh [CHAPTER...]     (make figures; chapters/*.md)
set -euo pipefail

# The tool that drives the browser, and Mermaid itself. Newer versions (from 12 on)
# need a newer node than Debian 12 has.
packages=(@mermaid-js/mermaid-cli@11.12.0 puppeteer@23.11.1 mermaid@11.12.2)

cd "$(dirname "$0")/../.."
. scripts/common.sh
[ $# -gt 0 ] || set -- $(grep -l '```mermaid' chapters/*.md)

dir=build/figures
mkdir -p "$dir"
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

for chapter; do
  rm -f "$dir/$(basename "$chapter" .md)"-*.png
  run timeout 300 "$dir/node_modules/.bin/mmdc" -q -i "$chapter" \
    -o "$dir/$(basename "$chapter")" -e png -b white -s 2 -p "$dir/browser.json"
done

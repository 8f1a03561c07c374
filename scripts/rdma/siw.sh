#!/bin/bash
# Builds siw, an iWARP adapter in software, for the kernel that machine.sh has
# unpacked: Debian's kernel comes without it, but its source has it.
#
# Usage: scripts/rdma/siw.sh FOLDER_OF_THE_KERNEL
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

kernel=$(realpath "$1")
version=$(basename "$kernel")   # 6.1.0-56-amd64
series=${version%.*}            # 6.1
module=$kernel/lib/modules/$version/extra/siw.ko
[ ! -e "$module" ] || exit 0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
run apt-get download -q "linux-headers-$version" \
  "linux-headers-${version%-*}-common" "linux-kbuild-$series" \
  "linux-source-$series" 2>&1 | grep -v unsandboxed
for package in *.deb; do dpkg-deb -x "$package" .; done
run tar -xf "usr/src/linux-source-$series.tar.xz" \
  "linux-source-$series/drivers/infiniband/sw/siw"
# The packages are not installed, so their files are not where they expect them.
sed -i "s|/usr/src|$folder/usr/src|" "usr/src/linux-headers-$version/Makefile"
run make -s -C "usr/src/linux-headers-$version" CONFIG_RDMA_SIW=m modules \
  M="$folder/linux-source-$series/drivers/infiniband/sw/siw"
mkdir -p "$(dirname "$module")"
cp "linux-source-$series/drivers/infiniband/sw/siw/siw.ko" "$module"
depmod -b "$kernel" "$version"

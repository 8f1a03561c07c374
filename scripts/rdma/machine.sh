#!/bin/bash
# Runs a command in a virtual machine whose kernel can do Soft-RoCE, in the root of
# the repository.
#
# Usage: scripts/rdma/machine.sh COMMAND...
#
# The machine has a kernel of its own, but the files of this one, so programs that
# were built here run there. It cannot change them: what it writes stays in its
# memory, apart from what it writes into $OUT, which is build/rdma/out/. It has no
# network. It takes no root, and no KVM, but without KVM it is twenty times slower
# than this machine. Exits with the status of the command.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/common.sh

[ $# -gt 0 ] || {
  sed -n 's/^# Usage: /usage: /p' "$0" >&2
  exit 2
}
dir=$PWD/build/rdma
mkdir -p "$dir"
PATH=$PATH:/usr/sbin:/sbin

# ---- The kernel: Debian's, unpacked and not installed ----

# The package that has the kernel; the one that we ask for only depends on it.
package=$(apt-cache depends linux-image-amd64 2>/dev/null |
  sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
[ -n "$package" ] || {
  echo "error: this takes Debian's package linux-image-amd64, and apt does not know" \
    "it; a kernel with rdma_rxe needs no virtual machine: see" \
    "chapters/appendix_setup.md" >&2
  exit 1
}
version=${package#linux-image-}
kernel=$dir/$version
if [ ! -d "$kernel" ]; then
  rm -rf "$kernel.part"
  mkdir "$kernel.part"
  cd "$kernel.part"
  run apt-get download -q "$package" 2>&1 | grep -v unsandboxed
  run dpkg-deb -x ./*.deb .
  rm ./*.deb
  depmod -b . "$version"
  cd "$dir"
  mv "$kernel.part" "$kernel"
  cd ../..
fi

# ---- What it starts with: a shell, and the modules that it takes to see files ----

initrd=$(mktemp -d)
trap 'rm -rf "$initrd"' EXIT
mkdir "$initrd"/{bin,modules,proc,sys,dev,lower,upper,root}
cp "$(command -v busybox)" "$initrd/bin/busybox"
for module in virtio_pci virtio_rng 9pnet_virtio 9p overlay; do
  modprobe -d "$kernel" -S "$version" --show-depends "$module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$initrd/paths"
number=100
while read -r path; do
  cp "$path" "$initrd/modules/$((number++)).ko"
done <"$initrd/paths"
cp scripts/rdma/init.sh "$initrd/init"
(cd "$initrd" && find . | cpio -o -H newc --quiet) >"$dir/initrd"

# ---- The machine ----

qemu=(qemu-system-x86_64 -cpu max -smp 2 -m 4G -nodefaults -no-reboot -display none
  -serial stdio -kernel "$kernel/boot/vmlinuz-$version")
# Without files, a kernel stops in a second or two. KVM may be there and not work.
if [ -w /dev/kvm ] && timeout 20 "${qemu[@]}" -accel kvm \
    -append "console=ttyS0 panic=-1" </dev/null 2>&1 | grep -q 'Kernel panic'; then
  accel=kvm
else
  accel=tcg,thread=multi
fi
echo "Starting a virtual machine with Linux $version, $(
  [ $accel = kvm ] && echo with KVM || echo 'emulated, because KVM does not work here')."

rm -rf "$dir/out"
mkdir -p "$dir/out"
{
  printf 'cd %q\nexport OUT=%q PATH=%q\n' "$PWD" "$dir/out" "$PATH"
  printf '%q ' "$@"
} >"$dir/out/.command"

"${qemu[@]}" -accel $accel -initrd "$dir/initrd" \
  -append "console=ttyS0 quiet panic=-1 kernel=$kernel out=$dir/out" \
  -fsdev local,id=files,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=files,mount_tag=files \
  -fsdev local,id=out,path="$dir/out",security_model=none \
  -device virtio-9p-pci,fsdev=out,mount_tag=out \
  -device virtio-rng-pci </dev/null

[ -s "$dir/out/.status" ] || {
  echo "error: the machine has stopped before the command had ended" >&2
  exit 1
}
exit "$(cat "$dir/out/.status")"

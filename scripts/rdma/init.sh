#!/bin/busybox sh
# The first program of the machine that machine.sh starts: gives it the files of the
# machine around it, with its own memory above them for what it writes. Then runs the
# command, and switches the machine off.

export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
stty -opost </dev/console
for module in /modules/*; do insmod "$module"; done

value() { sed "s/.* $1=\([^ ]*\).*/\1/" /proc/cmdline; }
options=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o "ro,cache=loose,$options" files /lower
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work \
  overlay /root

cd /root
# Those of the machine around are not ours.
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts devpts dev/pts
for folder in dev/shm run; do mount -t tmpfs tmpfs "$folder"; done
mkdir -p lib/modules
mount --bind "/root$(value kernel)/lib/modules" lib/modules
out=$(value out)
mount -t 9p -o "cache=none,$options" out "/root$out"
ip link set lo up
hostname machine
echo "127.0.0.1 localhost machine" >etc/hosts

# The kernel calls this when it wants a module by itself.
mkdir /sbin
cat >/sbin/modprobe <<'END'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec /bin/busybox chroot /root modprobe "$@"
END
chmod +x /sbin/modprobe

chroot /root /bin/bash "$out/.command" </dev/null
echo $? >"/root$out/.status"
sync
echo 0 >/proc/sys/kernel/printk  # not a word about that
poweroff -f

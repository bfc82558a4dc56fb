#!/bin/bash
# mount(8) of util-linux 2.41 mounts no overlay whose lowerdir= has more than 255 bytes: five layers with long paths.
# It gives each option to the kernel by fsconfig(2), which takes strings of 255 bytes; the message says "wrong fs type,
# bad option, bad superblock". mount(2), which mount of util-linux 2.38 calls, takes a page for all options; so does this
# mount with LIBMOUNT_FORCE_MOUNT2=always. Seen with mount 2.41-5 of Debian 13. Needs root.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
pool=http://deb.debian.org/debian/pool/main
for package in u/util-linux/mount_2.41-5 u/util-linux/libmount1_2.41-5 u/util-linux/libblkid1_2.41-5 \
    libs/libselinux/libselinux1_3.8.1-1 p/pcre2/libpcre2-8-0_10.46-1~deb13u3 g/glibc/libc6_2.41-12; do
    curl --fail --silent --show-error --output package.deb "$pool/${package}_amd64.deb"
    dpkg-deb --extract package.deb .
done
libraries=$folder/usr/lib/x86_64-linux-gnu
try() {  # LENGTH: mount an overlay whose lowerdir= has this length
    local half=$((($1 - 1) / 2)) first second
    first=$(printf "%${half}s" | tr ' ' a) second=$(printf "%$(($1 - 1 - half))s" | tr ' ' b)
    mkdir -p "$first" "$second" shown
    if unshare --mount env "${@:2}" "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" usr/bin/mount \
        -t overlay none -o "ro,lowerdir=$first:$second" shown 2>/dev/null; then echo mounts; else echo refuses; fi
}
seen="255: $(try 255), 256: $(try 256), 256 by mount(2): $(try 256 LIBMOUNT_FORCE_MOUNT2=always)"
echo "$seen"
[ "$seen" = "255: mounts, 256: refuses, 256 by mount(2): mounts" ]

#!/usr/bin/env bash
# Makes the data of experiments/README.md from packages of Debian 12: data/NAME for each text.
#
#     apt-get update && bash experiments/texts.sh       on Debian 12; takes 4 GB
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p data/packages
cd data/packages
# Debian replaces the kernel's packages every few weeks. If it no longer has this version,
# snapshot.debian.org does; another version gives other validation rows (held_out in log.jsonl).
apt-get download linux-{source,doc}-6.1=6.1.192-2 linux-libc-dev anarchism python3.11-doc \
    manpages-{de,fr,ja,ru}{,-dev} manpages-zh
for package in *.deb; do
    dpkg-deb --extract "$package" "${package%%_*}"
done
tar --extract --file=linux-source-6.1/usr/src/linux-source-6.1.tar.xz
find . -type f -name '*.gz' -exec gunzip --force {} +

mkdir -p english
number=10000
# other languages have characters that are not ASCII
find anarchism/usr/share/doc/anarchism/markdown linux-doc-6.1 -name '*.md' -o -name '*.rst.txt' |
    LC_ALL=C sort | xargs -d '\n' grep --files-without-match --perl-regexp '[^\x00-\x7F]' |
    while read -r file; do
        cp "$file" english/$((number++))
    done
cd ../..

prepare() {  # NAME VAL_FRACTION INPUT...
    python prepare.py --dataset=files --out_dir="data/$1" --val_fraction="$2" --input "${@:3}"
}
packages=data/packages
prepare kernel 0.02 "$packages/linux-source-6.1/**/*.c"  # 600 MB
prepare english 0.04 $packages/english
prepare c 0.05 "$packages/linux-libc-dev/**/*.h"
prepare html 0.05 "$packages/python3.11-doc/**/*.html"
prepare chinese 0.05 $packages/manpages-zh/usr/share/man
prepare french 0.05 $packages/manpages-fr{,-dev}/usr/share/man
prepare german 0.05 $packages/manpages-de{,-dev}/usr/share/man
prepare japanese 0.05 $packages/manpages-ja{,-dev}/usr/share/man
prepare russian 0.05 $packages/manpages-ru{,-dev}/usr/share/man

#!/bin/sh
# DeepSpeed in an environment of its own: ./install_deepspeed.sh [DIRECTORY]
# Its operators are compiled at first use: g++, ninja and the headers of libaio have to be there.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-"$here/.venv-deepspeed"}
command -v g++ > /dev/null || { echo "needs g++" >&2; exit 1; }
[ -e /usr/include/libaio.h ] || { echo "needs libaio.h (Debian: libaio-dev)" >&2; exit 1; }
python3 -m venv "$target"
"$target/bin/pip" install --quiet -c "$here/../../../constraints.txt" \
    torch transformers psutil numpy setuptools wheel ninja
"$target/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
echo "$target/bin/python"

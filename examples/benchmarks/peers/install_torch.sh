#!/bin/sh
# torch and Lightning alone, for plain Lightning and FSDP2: ./install_torch.sh [DIRECTORY]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-"$here/.venv-torch"}
python3 -m venv "$target"
"$target/bin/pip" install --quiet -c "$here/../../../constraints.txt" \
    torch transformers psutil numpy lightning
echo "$target/bin/python"

#!/usr/bin/env bash
# Collect the packages that a machine with a GPU lacks, as wheels for its Python, and print how large they are.
#     bash tools/gpu_wheels.sh [DIR]        DIR: default .wheels; tools/gpu_check.sh --wheels DIR installs them there
# PYTHON_VERSION (3.12) is that machine's Python, PEERS=1 adds pfl, which benchmarks/gpu.py compares with.
# Versions are those of constraints.txt. torch, lightning, timm, peft, scipy, scikit-learn, matplotlib, pytest and what these need are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.wheels}
version=${PYTHON_VERSION:-3.12}
mkdir -p "$folder"

names=(jsonargparse docstring-parser typeshed-client importlib-resources opacus cryptography cffi pycparser jsonschema
    jsonschema-specifications referencing rpds-py)
# pfl imports no more of what it needs than this
[ "${PEERS:-}" != 1 ] || names+=(pfl==0.6.0 'multiprocess<0.71' dill 'dp-accounting<0.6' 'prv-accountant<0.3')

platforms=()
for glibc in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

status=0
for name in "${names[@]}"; do
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "$version" "${platforms[@]}" -c <(sed 's/+cpu//' constraints.txt) -d "$folder" "$name" ||
        { echo "no wheel of $name"; status=1; }
done
du -ch "$folder"/*.whl | tail -1
exit $status

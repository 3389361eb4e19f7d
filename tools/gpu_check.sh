#!/usr/bin/env bash
# All that waits for a GPU, in one call of at most five minutes: is it right there, and how fast.
#     bash tools/gpu_check.sh --out DIR [--only PART,...] [--wheels DIR] [--device cpu --tiny]
#     --only      parts, with commas: suite right borrowed alone fast, or fast:WORK|WORK of benchmarks/gpu.py
#     --wheels    packages that this machine lacks, from tools/gpu_wheels.sh (default .wheels; without it: what is installed)
#     --device    cpu: a rehearsal, with --tiny on small shapes and few tests
# PYTHON is the interpreter that has torch. Each part is a process of its own with a time limit of its own; none stops the next. DIR
# gets at most eight files, written as the parts go. Exit code: the number of parts that failed or ran out of time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out='' only='' wheels=.wheels device=cuda tiny=''
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2; shift ;;
    --only) only=$2; shift ;;
    --wheels) wheels=$2; shift ;;
    --device) device=$2; shift ;;
    --tiny) tiny=--tiny ;;
    *) echo "gpu_check.sh: unknown argument $1; see its first lines" >&2; exit 2 ;;
    esac
    shift
done
[ -n "$out" ] || { echo "gpu_check.sh: say where results go: --out DIR" >&2; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
works=(blazefl flute pfl vit resnet)
case $only in
fast:*) IFS='|' read -ra works <<<"${only#fast:}"; only=fast ;;
esac
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONDONTWRITEBYTECODE=
started=$SECONDS

# An environment of its own over the one that has torch: nothing there is changed, and it goes with the temporary folder.
install() {
    "$python" -m venv --without-pip "$scratch/env" || return
    local inner=$scratch/env/bin/python
    "$python" -c 'import site; print("import site;", "; ".join(f"site.addsitedir({folder!r})" for folder in site.getsitepackages()))' \
        >"$("$inner" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    local pip=("$python" -m pip --python "$inner" install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check)
    if compgen -G "$wheels/*.whl" >/dev/null; then "${pip[@]}" --ignore-installed "$wheels"/*.whl || echo "wheels not installed"; fi
    "${pip[@]}" --no-build-isolation -e . || echo "not installed editable: the checkout is on PYTHONPATH"
    export PYTHONPATH=$PWD
    python=$inner
    "$python" - <<'END'
import importlib.util, platform
import torch
print("Python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.is_available())
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), [size // 2**20 for size in torch.cuda.mem_get_info()], "MB free and in all")
names = "lightning torchmetrics torchvision timm peft jsonargparse opacus cryptography jsonschema hypothesis xdist pytest_timeout pfl blazefl"
print("missing:", [name for name in names.split() if importlib.util.find_spec(name) is None] or "nothing")
import fedlightning
print("fedlightning", fedlightning.__version__)
END
}

# part NAME SECONDS COMMAND...: its output goes to DIR/NAME.txt, its state to DIR/summary.txt
part() {
    local name=$1 limit=$2 began=$SECONDS code state file=${1%%:*}
    shift 2
    [ -z "$tiny" ] || limit=$((4 * limit)) # a rehearsal on a busy machine
    # Interrupted, pytest still says what has failed. Without env a part in the background would ignore the signal.
    timeout --signal=INT --kill-after=8 "$limit" env --default-signal=INT "$@" >>"$out/$file.txt" 2>&1
    code=$?
    case $code in 0) state=passed ;; 124 | 137) state="out of time" ;; *) state="FAILED ($code)" ;; esac
    printf '%-14s %-12s %4ss of %4ss  %s\n' "$name" "$state" $((SECONDS - began)) "$limit" \
        "$(grep -aE '[0-9]+ (passed|failed|skipped|error)' "$out/$file.txt" | tail -1 | tr -d =)" >>"$out/summary.txt"
}

wanted() { [ -z "$only" ] || [[ ",$only," == *",$1,"* ]]; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: >"$out/summary.txt"
install >"$out/setup.txt" 2>&1
cat "$out/setup.txt"

rm -f "$out"/{suite,right,borrowed,alone,fast}.txt "$out/fast.jsonl"
pytest=("$python" -m pytest -q -p no:cacheprovider --tb=short --durations=10)
gpu=(FEDLIGHTNING_TEST_ACCELERATOR="$device" "${pytest[@]}")
suite=(CUDA_VISIBLE_DEVICES= "${pytest[@]}" --dist worksteal)
borrowed=(tests/test_equivalence.py tests/test_precision.py tests/stacked/test_vectorized_engine.py tests/fast)
if [ -n "$tiny" ]; then
    marks=(-m "gpu and not slow and not alone") few=2
    suite+=(tests/test_seeding.py tests/tensors)
    borrowed=(tests/test_equivalence.py -k "adam")
else
    marks=(-m "gpu and not alone") few=$((cores > 6 ? 6 : cores))
fi

# The suite needs no GPU: it runs beside the tests that do. What is timed has the machine for itself.
many=$((cores > 8 ? cores - few : cores))
wanted suite && { part suite 150 "${suite[@]}" -n "$many" & }
wanted right && part right 110 "${gpu[@]}" -n "$few" --dist worksteal tests/gpu "${marks[@]}"
wanted borrowed && part borrowed 60 "${gpu[@]}" -n "$few" --dist worksteal "${borrowed[@]}"
wait
wanted alone && part alone 40 "${gpu[@]}" tests/gpu -m alone
if wanted fast; then
    for work in "${works[@]}"; do
        part "fast:$work" "$([ "$work" = blazefl ] && echo 50 || echo 25)" bash -c \
            '"$1" -m benchmarks.gpu "$2" --device "$3" $4 2>&1 >>"$5"' _ "$python" "$work" "$device" "$tiny" "$out/fast.jsonl"
    done
fi

for name in suite right borrowed alone; do
    [ ! -f "$out/$name.txt" ] || { echo "--- $name"; grep -aE '^(FAILED|ERROR) ' "$out/$name.txt" | cut -c1-200 | head -15; }
done
[ ! -f "$out/fast.txt" ] || { echo "--- fast"; grep -aE '^(blazefl|flute|pfl|vit|resnet): ' "$out/fast.txt" | cut -c1-200; }
echo "--- summary, $((SECONDS - started)) s in all"
sort "$out/summary.txt"
exit "$(grep -cvE '^[^ ]+ +passed' "$out/summary.txt")"

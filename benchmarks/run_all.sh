#!/usr/bin/env bash
# Run every benchmark in turn and keep the raw samples under a name.
#
#   benchmarks/run_all.sh NAME [quick]
#
# Some eleven minutes (at most seventeen), four if quick. PYTHON says which interpreter. Leave the machine
# alone meanwhile: then run benchmarks/summary.py.
set -u
cd "$(dirname "$0")/.."
name=${1:?a name for this run, such as run1}
python=${PYTHON:-python}
if [ "${2:-}" = quick ]; then
  bounds="--blocks 5 --seconds 1"; training="$bounds --models mlp lenet lstm"
  ranks="$bounds --models mlp --ranks 2"; inference="--blocks 4 --batches 60"; share=4
else
  bounds="--blocks 40 --seconds 6"; training="--blocks 40 --seconds 12"
  ranks="--blocks 40 --seconds 5 --ranks 2 4"; inference="--blocks 6 --batches 200"; share=1
fi
# The script's own threads do not spin on the cores of the others; each step sets how many it uses.
export OMP_WAIT_POLICY=passive
failed=0
# run NAME SECONDS ARGUMENTS: what takes longer is stopped, and has kept what it found by then.
run() {
  echo "== $1"
  timeout $(($2 / share)) "$python" "benchmarks/$1/run.py" "${@:3}" --save "$name" ||
    { echo "FAILED or stopped: $1"; failed=1; }
}
run overhead 60 $bounds
run random 40 $bounds
run sync 60 $bounds
run reduction 60 $bounds
run memory 120 --only step replica flat
run training 290 $training
run ranks 230 $ranks
run inference 140 $inference
exit $failed

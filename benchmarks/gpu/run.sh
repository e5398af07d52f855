#!/usr/bin/env bash
# What needs an accelerator, in at most five minutes on one: its tests, then its benchmark.
#
#   benchmarks/gpu/run.sh [NAME]
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
timeout 150 "$python" -m pytest -q tests/gpu
timeout 150 "$python" benchmarks/gpu/run.py --blocks 20 ${1:+--save "$1"}

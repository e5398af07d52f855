"""Print the table of all targets from the raw results of up to three runs per benchmark.

Usage: python benchmarks/summary.py [RUN ...] [--write docs/performance.md]

A run is the name given to ``--save`` (run_all.sh takes it as its argument). Without names the three
newest files of each folder are read. A target counts as reached when the whole interval of each of
its findings is on the right side of the goal in three runs.
"""

import argparse
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
NUM_RUNS = 3
BEGIN, END = "<!-- targets: made by benchmarks/summary.py -->\n", "<!-- end of targets -->\n"

TARGETS = {
    1: "one slot passes through",
    2: "training on all cores, against plain torch",
    3: "training on all cores, against DDP over gloo",
    4: "nothing changed since the last call",
    5: "everything changed: separate copies",
    6: "gradient reduction on the CPU",
    7: "handing work over, K=2",
    8: "start of replicas, import",
    9: "memory of one more CPU replica",
    10: "memory over time",
    11: "the same bits for any number of workers or ranks",
    12: "ranks over gloo, against DDP",
    13: "inference, equal slots",
    14: "inference, one slot four times slower",
    15: "random streams",
}


def read_runs(names=(), folder=HERE):
    """The findings of each run: a list of {(target, what): finding}, and the machines."""
    runs, machines = [], []
    for results in sorted(folder.glob("*/results")):
        files = sorted(results.glob("*.json"), key=lambda path: path.stat().st_mtime)
        if names:
            files = [path for path in files if path.stem.partition("_")[2] in names]
        records = [record for record in map(read, files) if "findings" in record]
        for place, record in enumerate(records[-NUM_RUNS:]):
            while len(runs) <= place:
                runs.append({})
            machines.append(record["machine"])
            for finding in record["findings"]:
                if finding["target"] is not None:
                    runs[place][finding["target"], finding["what"]] = finding
    return runs, machines


def read(path):
    return json.loads(path.read_text())


def is_reached(finding):
    """Whether the whole interval is on the right side; None without a goal."""
    if finding["goal"] is None:
        return None
    relation, number = finding["goal"].split()
    if relation == ">=":
        return finding["low"] >= float(number)
    return finding["high"] <= float(number)


def judge(found):
    """One word for a finding's runs."""
    verdicts = [is_reached(one) for one in found]
    if verdicts[0] is None:
        return "told only"
    if all(verdicts):
        return "reached" if len(verdicts) >= NUM_RUNS else f"in {len(verdicts)} of {NUM_RUNS} runs"
    return f"no ({sum(verdicts)} of {len(verdicts)} runs)"


def make_lines(runs):
    """The lines of the table, one per finding, in the order of the targets."""
    lines = ["| # | target | goal | found | reached |", "| --- | --- | --- | --- | --- |"]
    for target, title in TARGETS.items():
        keys = [key for run in runs for key in run if key[0] == target]
        if not keys:
            lines.append(f"| {target} | {title} | | | not measured |")
        for _, what in dict.fromkeys(keys):
            found = [run[target, what] for run in runs if (target, what) in run]
            middle = statistics.median(one["middle"] for one in found)
            low, high = min(one["low"] for one in found), max(one["high"] for one in found)
            text = f"{middle:.3g} {found[-1]['unit']} [{low:.3g}, {high:.3g}]"
            goal = found[-1]["goal"] or ""
            lines.append(f"| {target} | {title}: {what} | {goal} | {text} | {judge(found)} |")
    return lines


def describe(machines):
    """What the figures were taken on."""
    if not machines:
        return "Nothing was measured yet."
    one = machines[-1]
    loads = [machine["load"][0] for machine in machines if machine["load"]]
    steal = max(machine["steal_frac"] or 0 for machine in machines)
    return (
        f"{one['cores']} cores of {one['processor']}, Python {one['python']}, "
        f"torch {one['torch']}, {one['date']}; load {min(loads):.1f} to {max(loads):.1f}, at most "
        f"{steal:.1%} stolen by the host. Intervals are the widest of the runs, medians the middle "
        f"of theirs."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="names of runs; by default the newest three")
    parser.add_argument("--write", metavar="PAGE", help="put the table into this page")
    options = parser.parse_args()
    runs, machines = read_runs(options.runs)
    text = "\n".join([describe(machines), "", *make_lines(runs)]) + "\n"
    print(text)
    if options.write:
        page = Path(options.write)
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(before + BEGIN + text + END + after)


if __name__ == "__main__":
    main()

"""Check on a GPU what was computed without one:

    python -m benchmarks.gpu_check [--device cpu] [--tiny] [--bundle DIR] [--seconds N] [--output DIR] [PART …]

`scripts/gpu_check.sh` starts it. Each part of `parts` is a module with a function `run`, which makes checks and reports
figures. It runs in a process of its own, which is a fork of one that has imported everything, and is ended after the
part's time limit. Parts that measure times run alone, and then the others at the same time. The output directory has
the results of all parts, and Markdown tables of them, at any time. A part that fails does not stop the others.

`--bundle` names the directory that `scripts/gpu_bundle.sh prepare` made elsewhere. It has values that need no GPU, such
as those of the CPU, which parts otherwise compute themselves.

With `--tiny`, every part has shapes that take seconds. `--device cpu` runs the same code on the CPU, with tiny shapes;
what only a GPU can show is then listed as not measured, with the reason.
"""

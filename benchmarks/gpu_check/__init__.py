"""Check on a GPU what was computed without one:

    python -m benchmarks.gpu_check [--device cpu] [--tiny] [--output DIR] [PART …]

`scripts/gpu_check.sh` starts it. Each part of `parts` is a module with a function `run`, which makes checks and reports
figures. It runs in a process of its own, which is ended after the part's time limit, and its result is added to one
JSON file when it ends. A part that fails does not stop the others. At the end, all results of the file are written as
Markdown tables for docs/performance.md.

With `--tiny`, every part has shapes that take seconds. `--device cpu` runs the same code on the CPU, with tiny shapes;
what only a GPU can show is then listed as not measured, with the reason.
"""

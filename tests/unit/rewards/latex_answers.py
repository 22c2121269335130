"""Awkward answers in LaTeX: (reference answer, completion). Half of the completions are right, and many look wrong."""

from __future__ import annotations

from itertools import product

_BOXED = r"So the answer is $\boxed{%s}$."
_PAIRS = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", r"\dfrac{1}{2}"),
    ("0.5", r"\tfrac{2}{4}"),
    ("1/2", r"\frac{1}{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"2\sqrt2", r"\sqrt{8}"),
    (r"\sqrt[3]{27}", "3"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(a+b)(a-b)", "a^2-b^2"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"\pi", r"3.14159265358979"),
    (r"\frac{\pi}{4}", r"\arctan(1)"),
    (r"2\pi r", r"\pi \cdot 2r"),
    ("e^{i\\pi}", "-1"),
    ("1{,}000", "1000"),
    ("1,000,000", "10^6"),
    ("12\\%", "0.12"),
    ("12\\%", "12"),
    (r"\$18.50", "18.5"),
    ("-3", "−3"),
    (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"),
    (r"3\,\mathrm{kg}", "3"),
    (r"\left(1,2\right)", "(1, 2)"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("[0,1)", r"0 \le x < 1"),
    (r"(-\infty, 3]", r"x \leq 3"),
    (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("1+2i", "2i+1"),
    (r"\frac{1}{1-i}", r"\frac{1+i}{2}"),
    (r"\log_2 8", "3"),
    (r"\ln e^2", "2"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"2^{10}", "1024"),
    (r"\sum_{k=1}^{4} k", "10"),
    (r"x \in \mathbb{R}", r"\mathbb{R}"),
    (r"\emptyset", r"\varnothing"),
    (r"\text{yes}", "yes"),
    (r"\textbf{B}", "B"),
    (r"\text{(C)}", "C"),
    ("7", r"7\text{ or }8"),
    (r"x=1 \text{ or } x=2", r"x=2, x=1"),
    (r"y = 2x + 1", r"2x - y + 1 = 0"),
]
_WRONG = ("", "I do not know.", r"\boxed{", r"$\frac{1}{$", "####", r"$\boxed{}$", "\\" * 50, "{" * 40, "$$", "NaN")


def latex_answers() -> list[tuple[str, str]]:
    """Return at least 100 pairs of a reference answer and a completion."""
    boxed = [(answer, _BOXED % given) for answer, given in _PAIRS]
    plain = [(answer, f"${given}$") for answer, given in _PAIRS[::2]]
    return boxed + plain + list(product((r"\frac{1}{2}", r"\{1,2\}", "42"), _WRONG))

"""The operators that change a node of the package's code: those of any program, and those of this field."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.mutants.source import Function, Place, Source


@dataclass(frozen=True)
class Change:
    """The replacement of a node's text."""

    node: ast.AST
    after: str
    description: str


Operator = Callable[[Place, Source], Iterator[Change]]

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|",
}  # fmt: skip
_MASK = re.compile(r"mask|kept|valid|counted\b|active|selected|~|owned|is_last")
_OTHER_SUM = re.compile(r"[\[\"]|names?\b|text|^\(|, ")
_PATH = re.compile(r"\bf?\"|dir|path|parent|root|CONFIG|MANIFEST", re.IGNORECASE)
_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "reduce_scatter", "broadcast", "broadcast_object_list", "barrier",
    "reduce", "gather_object", "all_to_all_single",
}  # fmt: skip
_OTHER_GROUP = {
    "tp": "dp", "dp": "tp", "cp": "tp", "pp": "dp", "dp_cp": "dp", "tp_dp_cp": "tp", "expt_dp": "dp", "expt_tp": "tp",
    "tp_group": "cp_group", "cp_group": "tp_group",
}  # fmt: skip
_REDUCTIONS = {
    "sum": "mean", "mean": "sum", "amax": "amin", "amin": "amax", "all": "any", "any": "all", "MAX": "SUM",
    "SUM": "MAX", "MIN": "MAX", "logaddexp": "maximum",
}  # fmt: skip
# Steps of training, of a checkpoint or of a weight sync that one call takes.
_STEPS = {
    "gather_parameters", "set_training", "mark_changed", "mark_updated", "mark_gathered", "zero_grad",
    "zero_grad_buffer", "prepare_grads", "reload_model_params", "restore_random_state", "load_state_dict", "wait",
    "verify", "verify_checkpoint", "check_digests", "freeze_reference", "sleep", "forget_lengths", "finish_training",
    "restore_optimizer", "allocate_gradients", "free_gradients", "forget_graphs", "publish", "confirm",
    "set_step_count", "set_version", "release", "begin_step", "requires_grad_", "eval", "put_back", "truncate",
    "flush", "keep_only", "clear", "check", "shutdown",
}  # fmt: skip
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.Tuple, ast.List, ast.Dict)


def _whole(node: ast.AST, source: Source) -> str:
    """Return the text of a node, in brackets if it could bind differently elsewhere."""
    text = source.text(node)
    return text if isinstance(node, _ATOMS) and "\n" not in text else f"({text})"


def _name_called(node: ast.AST) -> str:
    """Return the last name of the called function, or "" if the node is not a call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def _calls_of_modules(node: ast.Call, *modules: str) -> bool:
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in modules


def flip_comparison(place: Place, source: Source) -> Iterator[Change]:
    """Move the bound of a comparison, or negate it."""
    node = place.node
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = _whole(node.left, source), _whole(node.comparators[0], source)
        yield Change(node, f"{sides[0]} {_COMPARISONS[type(node.ops[0])]} {sides[1]}", "another comparison")


def swap_arithmetic(place: Place, source: Source) -> Iterator[Change]:
    """Swap an arithmetic operator, or leave a sign out."""
    node = place.node
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = node.left, node.right
        text = source.text(node)
        if _OTHER_SUM.search(text) and isinstance(node.op, ast.Add) or _PATH.search(text):
            return  # of lists, texts or paths
        yield Change(
            node, f"{_whole(sides[0], source)} {_ARITHMETIC[type(node.op)]} {_whole(sides[1], source)}",
            "another operator",
        )  # fmt: skip
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield Change(node, _whole(node.operand, source), "a sign left out")


def add_one(place: Place, source: Source) -> Iterator[Change]:
    """Add 1 to an integer."""
    node = place.node
    if isinstance(node, ast.Constant) and type(node.value) is int and not isinstance(place.parent, ast.UnaryOp):
        yield Change(node, str(node.value + 1), "an integer off by one")


def drop_statement(place: Place, source: Source) -> Iterator[Change]:
    """Drop a call whose value is not used, an assignment to an attribute, or a `continue`."""
    node = place.node
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name_called(node.value) == "__init__":
        return
    assigns = isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        and not place.qualified_name.endswith("__init__")
    )
    if is_call or assigns or isinstance(node, ast.Continue):
        yield Change(node, "pass", "a statement left out")


def swap_logic(place: Place, source: Source) -> Iterator[Change]:
    """Swap `and` and `or`, or leave a `not` out."""
    node = place.node
    if isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield Change(node, f"({other.join(_whole(value, source) for value in node.values)})", "and ↔ or")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Change(node, _whole(node.operand, source), "a negation left out")


def change_default(place: Place, source: Source) -> Iterator[Change]:
    """Change the default of an argument or of a dataclass's field."""
    node, parent = place.node, place.parent if place.parents else None
    if isinstance(node, ast.Constant) and isinstance(parent, ast.arguments | ast.AnnAssign):
        if isinstance(node.value, bool):
            yield Change(node, str(not node.value), "another default")
        elif isinstance(node.value, int | float):
            yield Change(node, repr(node.value * 2 + 1), "another default")


def negate_condition(place: Place, source: Source) -> Iterator[Change]:
    """Negate the condition of a branch, or never raise what it guards."""
    node = place.node
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
        yield Change(node.test, "False", "a check left out")
    elif isinstance(node, ast.If | ast.IfExp) and not ast.unparse(node.test).endswith("is None"):
        yield Change(node.test, f"not ({source.text(node.test)})", "a condition negated")


def replace_return(place: Place, source: Source) -> Iterator[Change]:
    """Return something else."""
    node = place.node
    if isinstance(node, ast.Return) and node.value is not None:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            yield Change(value, str(not value.value), "another result")
        elif isinstance(value, ast.Compare | ast.BoolOp) or _name_called(value) in ("any", "all", "isinstance"):
            yield Change(value, "True", "another result")
        elif isinstance(value, ast.IfExp):
            yield Change(value, _whole(value.orelse, source), "another result")
        elif isinstance(value, ast.Name | ast.Attribute):
            yield Change(value, "None", "another result")


GENERAL: dict[str, Operator] = {
    "comparison": flip_comparison, "arithmetic": swap_arithmetic, "constant": add_one, "statement": drop_statement,
    "logic": swap_logic, "default": change_default, "condition": negate_condition, "result": replace_return,
}  # fmt: skip


def drop_collective(place: Place, source: Source) -> Iterator[Change]:
    """Leave a collective out, so that every rank goes on with its own part."""
    node = place.node
    if isinstance(node, ast.Expr) and _name_called(node.value) in _COLLECTIVES:
        if _calls_of_modules(node.value, "dist"):  # type: ignore[arg-type]
            yield Change(node, "pass", "a collective left out")
    if isinstance(node, ast.Call) and node.args:
        name, first = _name_called(node), _whole(node.args[0], source)
        if name == "gather_from_ranks":
            yield Change(node, f"{first}[None]", "only this rank's part, instead of that of all ranks")
        elif name == "share":
            yield Change(node, f"({first})()", "this rank's value, instead of rank 0's")
        elif name == "find_first_failure" or (
            name in ("sum", "max") and _calls_of_modules(node, "ranks", "batch.ranks", "self._ranks")
        ):
            yield Change(node, first, "this rank's value, instead of that of all ranks")


def use_other_group(place: Place, source: Source) -> Iterator[Change]:
    """Use another process group of the same topology."""
    node = place.node
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _OTHER_GROUP:
        owner = source.text(node.value)
        if owner.endswith(("groups", "sharding")):
            yield Change(node, f"{owner}.{_OTHER_GROUP[node.attr]}", "another process group")


def drop_mask(place: Place, source: Source) -> Iterator[Change]:
    """Leave a mask out."""
    node = place.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.BitAnd):
        if isinstance(node.left, ast.List):
            return
        for side, other in ((node.right, node.left), (node.left, node.right)):
            if _MASK.search(source.text(side)) and (isinstance(node.op, ast.Mult) or _MASK.search(source.text(other))):
                yield Change(node, _whole(other, source), "a mask left out")
                return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("masked_fill", "masked_fill_"):
            yield Change(node, _whole(node.func.value, source), "a mask left out")
        if source.text(node.func) == "torch.where" and len(node.args) == 3:
            yield Change(node, _whole(node.args[1], source), "a mask left out")


def shift_by_one(place: Place, source: Source) -> Iterator[Change]:
    """Read the token before or after the right one."""
    node = place.node
    if isinstance(node, ast.Slice) and isinstance(place.parent, ast.Tuple) and node.step is None:
        text = source.text(node)
        if text in ("1:", ":-1"):
            yield Change(node, {"1:": ":-1", ":-1": "1:"}[text], "a shift by one token")
    if isinstance(node, ast.Call) and node.args:
        if _name_called(node) == "roll" and source.text(node.args[0]) in ("-1", "1"):
            yield Change(node.args[0], {"-1": "1", "1": "-1"}[source.text(node.args[0])], "a shift the other way")
        if _name_called(node) == "pad" and len(node.args) > 1 and source.text(node.args[1]) in ("(0, 1)", "(1, 0)"):
            yield Change(
                node.args[1],
                {"(0, 1)": "(1, 0)", "(1, 0)": "(0, 1)"}[source.text(node.args[1])],
                "a shift by one token",
            )


def drop_temperature(place: Place, source: Source) -> Iterator[Change]:
    """Leave a temperature out."""
    node = place.node
    if isinstance(node, ast.keyword) and node.arg == "temperature" and not isinstance(node.value, ast.Constant):
        yield Change(node.value, "1.0", "a temperature left out")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "temperature" in source.text(node.right):
        yield Change(node, _whole(node.left, source), "a temperature left out")
    if isinstance(node, ast.If) and source.text(node.test).endswith("temperature is not None"):
        yield Change(node.test, "False", "a temperature left out")


def keep_old_version(place: Place, source: Source) -> Iterator[Change]:
    """Do not note a new version, step or state."""
    node = place.node
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    names = " ".join(source.text(target) for target in targets)
    if re.search(r"\b(self|queue|model)\S*(version|_step\b|_weights\b|_checked|_pending|batches_skipped)", names):
        if not place.qualified_name.endswith("__init__"):
            yield Change(node, "pass", "a version or a step that is not noted")


def skip_disk_step(place: Place, source: Source) -> Iterator[Change]:
    """Leave out what makes files durable or atomic."""
    node = place.node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name_called(node.value)
        if name in ("fsync", "rename", "_sync_directory", "rmtree", "unlink") or (
            name == "replace" and _calls_of_modules(node.value, "os")
        ):
            yield Change(node, "pass", "a step on disk left out")


def use_other_seed(place: Place, source: Source) -> Iterator[Change]:
    """Use the same seed everywhere."""
    node = place.node
    if isinstance(node, ast.keyword) and node.arg == "seed" and not isinstance(node.value, ast.Constant):
        yield Change(node.value, "0", "another seed")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        if re.search("seed", source.text(node.left)) and not isinstance(place.parent, ast.BinOp):
            yield Change(node, _whole(node.left, source), "another seed")


def keep_gradient(place: Place, source: Source) -> Iterator[Change]:
    """Let gradients flow where they must not, or record what is not differentiated."""
    node = place.node
    if isinstance(node, ast.Call) and _name_called(node) == "detach" and isinstance(node.func, ast.Attribute):
        yield Change(node, _whole(node.func.value, source), "a gradient that is not cut off")
    if isinstance(node, Function):
        for decorator in node.decorator_list:
            if source.text(decorator) == "torch.no_grad()":
                yield Change(decorator, "(lambda function: function)", "gradients are recorded")


def drop_bound(place: Place, source: Source) -> Iterator[Change]:
    """Leave a bound of values out."""
    node = place.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("clamp", "clamp_", "nan_to_num"):
            is_method = source.text(node.func.value) != "torch"
            value = node.func.value if is_method else node.args[0]
            yield Change(node, _whole(value, source), "a bound left out")
        if source.text(node.func) in ("torch.maximum", "torch.minimum") and len(node.args) == 2:
            yield Change(node, _whole(node.args[0], source), "a bound left out")


def use_other_reduction(place: Place, source: Source) -> Iterator[Change]:
    """Reduce in another way."""
    node = place.node
    if isinstance(node, ast.Attribute) and node.attr in _REDUCTIONS:
        owner = source.text(node).removesuffix(node.attr)  # with the brackets around it
        is_operation = node.attr.isupper()
        if is_operation == owner.endswith("ReduceOp.") and owner != "ranks.":
            if is_operation or (isinstance(place.parent, ast.Call) and place.parent.func is node):
                yield Change(node, owner + _REDUCTIONS[node.attr], "another reduction")


def count_locally(place: Place, source: Source) -> Iterator[Change]:
    """Divide by a count of this microbatch, instead of that of the global batch."""
    node = place.node
    if isinstance(node, ast.keyword) and node.arg == "global_normalization_factor":
        if not source.text(node.value).startswith("global_normalization_factor"):
            yield Change(node.value, "None", "a local count instead of the global one")


def drop_coefficient(place: Place, source: Source) -> Iterator[Change]:
    """Leave out the coefficient of a term."""
    node = place.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        coefficient = re.compile(
            r"^(self\.)?cfg\.\w+$|^discount$|^gae_lambda$|^beta$|weight$|^self\._?\w*(weight|scale)"
        )
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if coefficient.search(source.text(side)):
                yield Change(node, _whole(other, source), "a coefficient left out")
                return


def share_memory(place: Place, source: Source) -> Iterator[Change]:
    """Leave a copy out, so that a later change shows in it."""
    node = place.node
    if isinstance(node, ast.Call) and _name_called(node) == "clone" and isinstance(node.func, ast.Attribute):
        yield Change(node, _whole(node.func.value, source), "a copy left out")


def skip_step(place: Place, source: Source) -> Iterator[Change]:
    """Leave out a step of training, of a checkpoint or of a weight sync."""
    node = place.node
    if isinstance(node, ast.Expr) and _name_called(node.value) in _STEPS:
        yield Change(node, "pass", "a step left out")


FIELD: dict[str, Operator] = {
    "collective": drop_collective, "group": use_other_group, "mask": drop_mask, "shift": shift_by_one,
    "temperature": drop_temperature, "version": keep_old_version, "disk": skip_disk_step, "seed": use_other_seed,
    "gradient": keep_gradient, "bound": drop_bound, "reduction": use_other_reduction, "count": count_locally,
    "coefficient": drop_coefficient, "copy": share_memory, "step": skip_step,
}  # fmt: skip

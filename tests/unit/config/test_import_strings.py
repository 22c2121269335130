"""Import strings: `file.py:name` and `package.module:name`, and what is said about those that cannot be loaded."""

from __future__ import annotations

import pickle
import sys

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string, load_object, make_absolute, make_string_absolute


@pytest.fixture(autouse=True)
def in_an_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("mine.py:Loss", True), ("pkg.mod:Loss", True), ("mine.py", True), ("clipped_pg", False), (7, False)],
)
def test_a_colon_or_a_file_tells_an_import_string_from_a_registered_name(text, expected):
    assert is_import_string(text) == expected


def test_a_file_is_relative_to_the_working_directory_then_to_the_config_directory(tmp_path):
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "mine.py").write_text("def f():\n    return 'conf'\n")
    assert load_object("mine.py:f", "loss.name", conf)() == "conf"
    (tmp_path / "mine.py").write_text("def f():\n    return 'here'\n")
    assert load_object("mine.py:f", "loss.name", conf)() == "here"


def test_a_file_is_imported_once_whatever_its_path_is_written_like(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    assert load_object("mine.py:Mine", "k") is load_object(str(tmp_path / "mine.py") + ":Mine", "k")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f():\n    return {name!r}\n")
    assert [load_object(f"{name}/mine.py:f", "k")() for name in "ab"] == ["a", "b"]


def test_a_dataclass_of_a_file_can_be_pickled(tmp_path):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: int\n"
    )
    (tmp_path / "mine.py").write_text(code)
    made = load_object("mine.py:Mine", "k")(3)
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_name_may_be_nested_and_a_module_may_be_installed():
    assert load_object("os.path:join", "k") is load_object("os:path.join", "k")


def test_a_file_imports_its_neighbours_and_not_those_of_another_directory(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour_of_mine.py").write_text(f"value = {name!r}\n")
        (tmp_path / name / "mine.py").write_text(
            "import neighbour_of_mine\ndef f():\n    return neighbour_of_mine.value\n"
        )
    try:
        assert load_object("first/mine.py:f", "k")() == "first"
        with pytest.raises(ConfigError, match=r"k: .*mine.py: 'neighbour_of_mine' is .*first.*rename the one"):
            load_object("second/mine.py:f", "k")
    finally:
        sys.modules.pop("neighbour_of_mine", None)


_BROKEN = {
    "no file": ("absent.py:f", r"loss.name: there is no file /.*absent.py nor /.*conf/absent.py; "),
    "no name": ("mine.py:Loos", r"loss.name='mine.py:Loos': mine.py has no 'Loos'; did you mean 'Loss'\?"),
    "no colon": ("mine.py", r"loss.name='mine.py' has no name; write mine.py:NAME"),
    "no file and no module": ("a/b:f", r"loss.name='a/b:f': 'a/b' is neither a .py file nor a module path; write "),
    "no identifier": ("mine.py:a-b", r"loss.name='mine.py:a-b' is not an import string; write file.py:name or "),
    "no module": ("minne:Loss", r"loss.name: there is no module 'minne'; .*write a file as in minne.py:NAME"),
    "not callable": ("mine.py:SIZE", r"loss.name='mine.py:SIZE' is the int 3; name a function or a class"),
    "syntax": ("syntax.py:f", r"loss.name: importing '.*syntax.py' raised SyntaxError: .*\(/.*syntax.py:2\)$"),
    "raises": ("raises.py:f", r"loss.name: importing '.*raises.py' raised KeyError: 'gone' \(/.*raises.py:1\)$"),
    "exits": ("exits.py:f", r"loss.name: importing '.*exits.py' raised SystemExit: 3 \(/.*exits.py:2\)$"),
    "imports a missing module": ("needs.py:f", r"raised ModuleNotFoundError: No module named 'absent_one' \("),
}


@pytest.mark.parametrize(("text", "message"), _BROKEN.values(), ids=list(_BROKEN))
def test_a_string_that_cannot_be_loaded_is_refused_in_one_line_that_names_the_key(tmp_path, text, message):
    (tmp_path / "conf").mkdir()
    (tmp_path / "mine.py").write_text("SIZE = 3\nclass Loss: pass\n")
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raises.py").write_text("{}['gone']\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "needs.py").write_text("import absent_one\n")
    with pytest.raises(ConfigError, match=message) as raised:
        load_object(text, "loss.name", tmp_path / "conf")
    assert "\n" not in str(raised.value)


def test_the_recorded_string_has_an_absolute_path(tmp_path):
    (tmp_path / "mine.py").write_text("")
    assert make_string_absolute("mine.py:f", "k") == f"{tmp_path / 'mine.py'}:f"
    assert make_string_absolute("pkg.mod:f", "k") == "pkg.mod:f"
    with pytest.raises(ConfigError, match="k: there is no file"):
        make_string_absolute("gone.py:f", "k")


def test_each_function_of_a_list_is_found_from_any_directory(tmp_path):
    (tmp_path / "mine.py").write_text("def f(): ...\n")
    tree = {
        "rollout": {"tools": {"functions": ["calculator", "mine.py:f"]}},
        "stages": {"grpo": {"rollout": {"tools": {"functions": ["package.module:f", "none.py:f"]}}}},
    }
    with pytest.raises(ConfigError, match=r"stages\.grpo\.rollout\.tools\.functions\[1\]: there is no file"):
        make_absolute(tree, None)
    assert tree["rollout"]["tools"]["functions"] == ["calculator", f"{tmp_path}/mine.py:f"]

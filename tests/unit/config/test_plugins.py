"""Importing plugins: where they are found, and errors that name the plugin."""

import sys
from importlib.metadata import EntryPoint
from typing import Literal

import pytest

from rl_megatron.cli import main
from rl_megatron.config.algorithm_kinds import register_algorithm_config
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading import registry as plugins
from rl_megatron.config.loading.load import from_yaml, load_config, to_yaml
from rl_megatron.config.loading.settings import section
from rl_megatron.config.schema import AlgorithmConfig


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A config directory; `sys.path` and `sys.modules` are as before when the test ends."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def loaded(directory, *names):
    return load_config([f"plugins=[{','.join(names)}]"], str(directory))


def test_a_module_of_the_config_directory_is_imported_and_kept_in_the_effective_configuration(directory):
    (directory / "plugin_of_mine.py").write_text("")
    (directory / "package_of_mine").mkdir()
    (directory / "package_of_mine" / "part.py").write_text("")
    config = loaded(directory, "plugin_of_mine", "package_of_mine.part")
    assert {"plugin_of_mine", "package_of_mine.part"} <= sys.modules.keys()
    assert config.plugins == ("plugin_of_mine", "package_of_mine.part")
    for name in config.plugins:
        del sys.modules[name]
    assert from_yaml(to_yaml(config), "there") == config
    assert "plugin_of_mine" in sys.modules, "a saved configuration imports its plugins"


def test_the_config_directory_comes_last_and_only_if_there_are_plugins(directory):
    load_config([], str(directory))
    assert str(directory) not in sys.path
    (directory / "plugin_of_mine.py").write_text("")
    loaded(directory, "plugin_of_mine")
    assert sys.path[-1] == str(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no module 'broken_plugin'", "broken_plugin.py in the directory of --config-dir"]),
        ("import absent_module", ["importing 'broken_plugin' raised ModuleNotFoundError", "absent_module", ".py:1)"]),
        ("\nraise RuntimeError('one\\ntwo')", ["raised RuntimeError: one two", "broken_plugin.py:2)"]),
        ("def f(:", ["raised SyntaxError"]),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(directory, content, words):
    if content is not None:
        (directory / "broken_plugin.py").write_text(content)
    with pytest.raises(ConfigError) as refused:
        loaded(directory, "broken_plugin")
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_plugin_that_an_installed_module_hides_is_refused(directory):
    (directory / "json.py").write_text("")
    with pytest.raises(ConfigError, match=r"plugins: 'json' is .*json/__init__\.py, and not the module.*rename"):
        loaded(directory, "json")


@pytest.mark.parametrize("listed", ["mine", "3", "[1]"])
def test_plugins_are_a_list_of_module_paths(listed):
    with pytest.raises(ConfigError, match="plugins=.*: must be a list of module paths"):
        load_config([f"plugins={listed}"])


def test_a_saved_configuration_whose_plugin_is_gone_is_named():
    text = to_yaml(load_config([])).replace("plugins: []", "plugins: [plugin_that_is_gone]")
    with pytest.raises(ConfigError, match="out/config.yaml: plugins: there is no module 'plugin_that_is_gone'"):
        from_yaml(text, "out/config.yaml")


def test_an_entry_point_is_imported_and_a_broken_one_is_named(directory, monkeypatch):
    (directory / "plugin_by_entry_point.py").write_text("")
    sys.path.append(str(directory))
    here = EntryPoint("mine", "plugin_by_entry_point", plugins.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "find_installed_plugins", lambda: (here,))
    load_config([])
    assert "plugin_by_entry_point" in sys.modules
    gone = EntryPoint("mine", "plugin_that_is_gone", plugins.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "find_installed_plugins", lambda: (gone,))
    with pytest.raises(ConfigError, match="no module 'plugin_that_is_gone'.*entry points"):
        load_config([])


def test_settings_that_would_take_unknown_keys_cannot_be_registered():
    class Loose(AlgorithmConfig):
        name: Literal["loose"] = "loose"

    @section
    class Nameless(AlgorithmConfig):
        """Its name has no default."""

    with pytest.raises(TypeError, match="Loose must be declared with @section"):
        register_algorithm_config(Loose)
    with pytest.raises(TypeError, match="Nameless.name needs a default"):
        register_algorithm_config(Nameless)


@pytest.mark.parametrize("command", [["convert", "import", "nowhere", "here"], ["inspect", "nowhere"]], ids=str)
def test_commands_without_a_configuration_import_plugins_too(directory, command, capsys):
    (directory / "plugin_of_mine.py").write_text("print('imported')")
    options = ["--plugin", "plugin_of_mine", "--config-dir", str(directory)]
    assert main([*command, *options]) == 2, "there is nothing to convert or inspect"
    assert "imported" in capsys.readouterr().out
    assert main([*command, "--plugin", "no_such_plugin"]) == 2
    assert "no_such_plugin" in capsys.readouterr().err

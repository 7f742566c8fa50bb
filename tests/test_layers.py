"""The rules of the house that a machine can check: who imports whom, private names in one file, sizes of files."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = [*ROOT.glob("zero_fx/*.py"), *ROOT.glob("passes/*.py"), *ROOT.glob("runtime/*.py")]


def imported(path: pathlib.Path) -> set[str]:
    """Absolute names of modules that a file imports; ours as zero_fx.…"""
    package = {"passes": "zero_fx.passes", "runtime": "zero_fx.runtime"}.get(path.parent.name, "zero_fx")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            names.add(".".join([*base, *([node.module] if node.module else [])]))
    return names


@pytest.mark.parametrize("path", CODE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_direction_of_imports(path):
    ours = {name for name in imported(path) if name.startswith("zero_fx")}
    if path.parent.name == "runtime":
        assert all(name.startswith("zero_fx.runtime") for name in ours), "runtime knows only torch"
        assert not any(name.startswith("torch.fx") for name in imported(path)), "runtime knows no FX"
    if path.parent.name == "passes":
        assert not any(name.startswith("zero_fx.runtime") for name in ours), "passes never import the runtime"


@pytest.mark.parametrize("path", CODE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_private_names_of_pytorch_live_in_one_file(path):
    if path.name == "torch_compat.py":
        return
    found = [name for name in imported(path) if re.match(r"torch\.(.*\.)?_", name)]
    assert not found, f"{path.name} imports {found}: put them into torch_compat.py"


@pytest.mark.parametrize("path", CODE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_module_level_mutable_state(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Dict, ast.List, ast.Set)):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            assert all(name.isupper() or name == "__all__" for name in names), f"{names} in {path.name}: state or constant?"
        assert not any(isinstance(inner, ast.Global) for inner in ast.walk(node)), f"global in {path.name}"


@pytest.mark.parametrize("path", CODE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= 320
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{path.name}:{node.name}"


@pytest.mark.parametrize("name", ["passes"])
def test_each_pass_has_its_test_file(name):
    from zero_fx.passes.pipeline import NAMES

    for pass_name in NAMES:
        assert (ROOT / "passes" / f"{pass_name}.py").exists()
        assert (ROOT / "tests" / "passes" / f"test_{pass_name}.py").exists()

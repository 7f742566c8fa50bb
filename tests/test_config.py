"""Options: what is unknown or cannot be is refused, with the value and what was expected."""

import pytest

from zero_fx.config import Config, Debug, make_config
from zero_fx.torch_compat import check_version, private


@pytest.mark.parametrize("stage", [4, -1, "3", None, True, 2.5])
def test_unknown_stage(stage):
    with pytest.raises(ValueError, match=r"stage=.*expected 0, 1, 2 or 3"):
        Config(stage=stage)


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("lowering", "triton", "expected one of 'inductor', 'eager'"),
        ("dynamic", "yes", "expected None, True or False"),
        ("keep_whole_below", -1, "expected 0 or more"),
        ("keep_whole_below", 1.5, "an int"),
        ("sync_module_states", 1, "expected True or False"),
        ("timeout_s", 0, "above 0"),
    ],
)
def test_bad_values(option, value, expected):
    with pytest.raises((ValueError, TypeError), match=expected):
        make_config(None, {option: value})


def test_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="no option 'lowring'; did you mean 'lowering'"):
        make_config(None, {"lowring": "eager"})


def test_config_and_options_together_are_refused():
    with pytest.raises(ValueError, match="config= and stage were both given"):
        make_config(Config(), {"stage": 1})
    with pytest.raises(TypeError, match="expected a zero_fx.Config"):
        make_config({"stage": 1}, {})


def test_debug_switches(monkeypatch):
    monkeypatch.setenv("ZERO_FX_DEBUG", "2")
    monkeypatch.setenv("ZERO_FX_SKIP", "a,b")
    assert Debug.from_environment(("a", "b", "c")) == Debug(2, None, ("a", "b"))
    with pytest.raises(ValueError, match="ZERO_FX_SKIP names 'b'"):
        Debug.from_environment(("a",))
    monkeypatch.setenv("ZERO_FX_DEBUG", "9")
    with pytest.raises(ValueError, match="expected 0, 1, 2 or 3"):
        Debug.from_environment(("a", "b"))


def test_versions_of_pytorch():
    with pytest.raises(ImportError, match="needs PyTorch 2.11 or newer and found 2.10.1"):
        check_version("2.10.1+cpu")
    with pytest.warns(UserWarning, match="tested with PyTorch 2.11 to 2.14 and found 2.15"):
        check_version("2.15.0")
    check_version("2.14.1")
    with pytest.raises(ImportError, match="cannot read"):
        check_version("unknown")
    with pytest.raises(ImportError, match="needs torch._dynamo.no_such_name"):
        private("torch._dynamo", "no_such_name")

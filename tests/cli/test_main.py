"""The command line: thin, and refusing in one message."""

import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.errors import RecipeError

QUICKSTART = Path(__file__).parent.parent.parent / "recipes" / "quickstart.yaml"


def run(*arguments: str) -> int:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_a_misspelt_recipe_is_one_message_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("pretrain", str(QUICKSTART), "training.learning_rate=1") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {QUICKSTART}: training.learning_rate: unknown key; did you mean lr?\n"


def test_an_option_sets_what_a_trailing_argument_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", str(QUICKSTART), "--set", "training.lr=x") == 2
    assert 'training.lr: "x" is text' in capsys.readouterr().err


def test_lost_ranks_are_a_list_of_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("switch", str(QUICKSTART), str(QUICKSTART), "--lost", "x") == 2
    assert 'error: --lost: "x" is no range; write one such as 0-3' in capsys.readouterr().err


def test_an_unknown_command_and_a_missing_argument_do_not_succeed() -> None:
    assert run("pretrian") != 0
    assert run("pretrain") != 0


def test_help_names_every_command_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom hetero_megatron.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(command in shown for command in ("pretrain", "explain", "switch"))


def test_a_defect_keeps_its_traceback() -> None:
    from hetero_megatron.cli.errors import reported

    with pytest.raises(ZeroDivisionError), reported():
        _ = 1 // 0


def test_a_refusal_with_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_megatron.cli.errors import reported

    with pytest.raises(SystemExit), reported():
        raise RecipeError("pipelines[0].stages[red]: " + "long " * 40)
    assert capsys.readouterr().err == "error: pipelines[0].stages[red]: " + "long " * 40 + "\n"

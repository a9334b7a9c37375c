"""`turbojax generate` with one prompt, and what every command does with errors."""

import subprocess
import sys

import pytest


def test_text_goes_to_stdout_alone(run, pipes):
    result = run("generate", "why is it so")
    assert result.exit_code == 0
    assert result.stdout == "WHY IS IT SO\n"
    assert "4 tokens" in result.stderr
    assert pipes[0].is_closed


def test_defaults_are_those_of_the_configs(run, pipes):
    from turbojax.configs import EngineConfig, GenerationConfig

    run("generate", "hi")
    assert pipes[0].config == EngineConfig()
    assert pipes[0].calls == [("hi", GenerationConfig(), True)]


def test_options_reach_the_configs(run, pipes):
    args = "--max-new-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3 --raw -m some/model"
    engine = "--dtype float32 --session-len 99 --max-batch-size 5 --quant-policy 8 --cache-max-entry-count 300"
    engine += " --model-format awq"
    result = run("generate", "a b c", *args.split(), *engine.split())
    assert result.stdout == "A B\n"
    _, gen, do_preprocess = pipes[0].calls[0]
    assert not do_preprocess
    assert (gen.max_new_tokens, gen.temperature, gen.top_p, gen.top_k, gen.min_p, gen.random_seed) == (
        2, 0.5, 0.9, 7, 0.1, 3,
    )  # fmt: skip
    assert gen.do_sample
    config = pipes[0].config
    assert pipes[0].model == "some/model"
    assert config.model_format == "awq"
    assert (config.dtype, config.session_len, config.max_batch_size, config.quant_policy) == ("float32", 99, 5, 8)
    assert config.cache_max_entry_count == 300
    assert isinstance(config.cache_max_entry_count, int)


def test_what_bounds_an_answer_reaches_the_config_and_stays_greedy(run, pipes, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    args = "--repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty -1 --stop END --stop ST --bad-word no"
    run("generate", "hi", *args.split(), "--json-schema", schema)
    _, gen, _ = pipes[0].calls[0]
    assert (gen.repetition_penalty, gen.presence_penalty, gen.frequency_penalty) == (1.2, 0.5, -1)
    assert (gen.stop_words, gen.bad_words) == (("END", "ST"), ("no",))
    assert gen.response_format == {"type": "json_schema", "json_schema": '{"type": "object"}'}
    assert gen.is_greedy


@pytest.mark.parametrize(
    ("args", "response_format"),
    [
        (["--regex", "a+"], {"type": "regex_schema", "regex_schema": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"type": "choice", "choice": ["yes", "no"]}),
        ([], None),
    ],
)
def test_the_form_of_an_answer_is_one_option(run, pipes, args, response_format):
    run("generate", "hi", *args)
    assert pipes[0].calls[0][1].response_format == response_format


def test_two_forms_of_an_answer_are_refused(run, pipes):
    result = run("generate", "hi", "--regex", "a", "--choice", "b")
    assert result.exit_code == 2
    assert "give one of" in result.stderr
    assert not pipes


def test_temperature_zero_is_greedy(run, pipes):
    run("generate", "hi", "--temperature", "0")
    assert pipes[0].calls[0][1].is_greedy


def test_an_error_of_the_request_is_one_line(run, pipes):
    result = run("generate", "one fail")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: out of pages"
    assert pipes[0].is_closed


def test_a_value_out_of_range_is_one_line_and_opens_nothing(run, pipes):
    result = run("generate", "hi", "--temperature", "-3")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert "temperature" in result.stderr
    assert pipes == []


@pytest.mark.parametrize(
    "args",
    [
        ["generate"],
        ["generate", "hi", "--input", __file__, "--output", "x.jsonl"],
        ["generate", "--input", __file__],
        ["generate", "hi", "--output", "x.jsonl"],
        ["generate", "--input", "no_such_file.jsonl", "--output", "x.jsonl"],
        ["generate", "hi", "--no-such-option"],
        ["generate", "hi", "--cache-max-entry-count", "much"],
        ["no_such_command"],
    ],
)
def test_usage_errors_exit_with_2(run, pipes, args):
    result = run(*args)
    assert result.exit_code == 2
    assert pipes == []


def test_ctrl_c_cancels_the_request_and_exits_with_130(run, pipes):
    result = run("generate", "one interrupt two")
    assert result.exit_code == 130
    assert pipes[0].num_cancelled == 1
    assert pipes[0].is_closed


def test_debug_shows_the_traceback(run):
    from turbojax.errors import TurbojaxError

    assert isinstance(run("--debug", "generate", "one fail").exception, TurbojaxError)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["generate", "--help"], ["check_env", "--help"]])
def test_help_imports_neither_jax_nor_transformers(args):
    code = (
        "import sys\nfrom turbojax.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'jax', 'flax', 'transformers', 'orbax', 'gguf'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "turbojax" in done.stdout

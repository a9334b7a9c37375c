"""A script that was written for LMDeploy, with nothing but its imports changed, on the default model made into AWQ."""

import pytest
from typer.testing import CliRunner

from turbojax.cli import app

pytestmark = pytest.mark.slow

SCRIPT = """
from turbojax.compat import GenerationConfig, TurbomindEngineConfig, turbomind

engine_config = TurbomindEngineConfig(
    model_name="smollm2",
    model_format="awq",
    tp=1,
    cache_max_entry_count=0.85,
    quant_policy=8,
    max_batch_size=64,
    session_len=32768,
)
pipe = turbomind.TurboMind.from_pretrained(path, engine_config=engine_config)
instance = pipe.create_instance()
prompt = "The capital of France is"
gen_config = GenerationConfig(max_new_tokens=512, temperature=0.7, top_p=0.9, stream=True)
for output in instance.stream_infer(session_id=1, input_ids=pipe.tokenizer.encode(prompt), gen_config=gen_config):
    print(pipe.tokenizer.decode(output.token_id), end="", flush=True)
"""


@pytest.fixture(scope="module")
def awq(smollm2, tmp_path_factory):
    """Without the searches, which take minutes: what is written is what they would round otherwise."""
    folder = tmp_path_factory.mktemp("awq") / "smollm2"
    options = ("--w-group-size", "64", "--calib-samples", "2", "--calib-seqlen", "32")
    searches = ("--no-search-scale", "--no-search-clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
        result = CliRunner().invoke(
            app.app, ["lite", "auto_awq", str(smollm2), "--work-dir", str(folder), *options, *searches]
        )
    assert result.exit_code == 0, result.stderr
    return folder


def test_the_script_runs_and_streams_an_answer(awq, capsys, caplog):
    scope = {"path": str(awq)}
    try:
        exec(compile(SCRIPT, "script.py", "exec"), scope)
        answer = capsys.readouterr().out
        assert any("a" <= letter.lower() <= "z" for letter in answer)
        output, pipe = scope["output"], scope["pipe"]
        assert output.status.name == "FINISH"
        assert 1 <= output.num_token <= 512
        # The model's own limit holds, and that is said.
        assert pipe.session_len == 8192
        assert "session_len 32768" in caplog.text
        assert pipe.model_name == "smollm2"
        assert pipe.pipe.memory is not None
    finally:
        scope["pipe"].close()

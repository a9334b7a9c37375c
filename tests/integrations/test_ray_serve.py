"""A Ray Serve deployment from plain values: what is refused before anything starts."""

import pytest

from turbojax.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'turbojax[ray,serve]'")

from turbojax.integrations.ray_serve import application, build
from turbojax.serve.settings import ServeConfig


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modle": "x"}, "build.args is 'modle'; accepted: model, engine, config, num_replicas"),
        ({"engine": {"max_batch": 3}}, "build.engine is .*max_batch.*; accepted: an object of dtype, "),
        ({"engine": "fast"}, "build.engine is 'fast'"),
        ({"engine": {"max_batch_size": 0}}, "EngineConfig.max_batch_size is 0"),
        ({"num_replicas": "many"}, "build.num_replicas is 'many'; accepted: a number"),
        ({"config": {"server_port": 80}}, "server_port is 80; accepted: its default under Ray Serve"),
    ],
)
def test_wrong_values_are_named(args, words):
    with pytest.raises(ConfigError, match=words):
        build(args)


def test_where_to_listen_is_serves_own_affair():
    with pytest.raises(ConfigError, match=r"server_name is '0\.0\.0\.0'; accepted: its default under Ray Serve"):
        application(config=ServeConfig(server_name="0.0.0.0"))


def test_an_application_from_the_command_line_has_what_it_was_told():
    app = build({"model": "some/repo", "num_replicas": "3", "num_gpus": "0.5", "engine": {"max_batch_size": 4}})
    deployment = app._bound_deployment
    assert deployment.num_replicas == 3
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": 0.5}
    assert deployment.max_ongoing_requests == 512
    model, engine, _ = deployment.init_args
    assert (model, engine.max_batch_size) == ("some/repo", 4)

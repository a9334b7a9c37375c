"""What is in deploy/ can be read, and names only what there is: commands, options, routes, metrics, files."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.serve.harness import fake_pipeline, service_on
from turbojax.cli.app import app as cli
from turbojax.serve.app import create_app
from turbojax.serve.settings import DEFAULT_PORT, ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PROMETHEUS = sorted((DEPLOY / "prometheus").glob("*.yaml"))
TLS = DEPLOY / "tls/deployment.yaml"
GUIDES_NAME = "kv_cache_usage_ratio"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def resources() -> dict[str, dict[str, Any]]:
    found = [one for path in MANIFESTS for one in documents(path)]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = resources()["Deployment"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    assert isinstance(only, dict)
    return only


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and what follows them."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, rest in (line.split(maxsplit=1) for line in lines)]


def instruction(word: str) -> str:
    (found,) = [rest for name, rest in dockerfile() if name == word]
    return found


def command_of(words: list[str]) -> Any:
    """A command of turbojax that was given its arguments: the context of click."""
    assert words[0] == "turbojax"
    command: Any = typer.main.get_command(cli)
    words = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command.make_context("turbojax", words)


def server_command() -> Any:
    return command_of([*json.loads(instruction("ENTRYPOINT")), *container()["args"]])


# -- the image --------------------------------------------------------------------------------------------


def test_the_image_is_made_of_what_is_there():
    assert dockerfile()[0] == ("FROM", "python:3.12-slim")
    for word, rest in dockerfile():
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [source for word, rest in dockerfile() if word == "COPY" for source in rest.split()[:-1]]
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {f"/source/{name}" for name in packages} <= {
        rest.split()[-1] for word, rest in dockerfile() if word == "COPY"
    }
    extras = instruction("ARG").removeprefix("EXTRAS=").split(",")
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    assert {"serve", "cuda12"} <= set(extras)


def test_the_image_runs_as_nobody_in_particular_and_listens_at_the_default_port():
    assert instruction("USER") == "turbojax"
    assert "--uid 10001" in dict(dockerfile())["RUN"] or any("--uid 10001" in rest for _, rest in dockerfile())
    assert int(instruction("EXPOSE")) == DEFAULT_PORT == ServeConfig().server_port
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert f":{DEFAULT_PORT}/health/live" in instruction("HEALTHCHECK")
    compile(json.loads(instruction("HEALTHCHECK").split("CMD ")[1])[2], "HEALTHCHECK", "exec")


def test_the_image_without_arguments_serves_to_the_outside():
    values = command_of(json.loads(instruction("ENTRYPOINT"))).params
    assert (values["server_name"], values["server_port"], values["model"]) == ("0.0.0.0", None, None)


# -- Kubernetes -------------------------------------------------------------------------------------------


def test_the_manifests_belong_together():
    found = resources()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels == found["Service"]["spec"]["selector"]
    assert labels == found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    (port,) = container()["ports"]
    assert port["containerPort"] == DEFAULT_PORT
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    mounts = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod()["volumes"]}
    assert pod()["securityContext"]["runAsUser"] == 10001, "the image's user"


def test_the_options_are_those_of_the_command():
    command = server_command()
    given = {"model": "/model", "model_name": "llama", "quant_policy": 8, "cache_max_entry_count": 0.85}
    assert command.params.items() >= given.items()
    known = {param.envvar for param in command.command.params if param.envvar}
    assert {one["name"] for one in container()["env"]} <= known


@pytest.fixture(scope="module")
def paths() -> set[str]:
    """Of the server's routes."""
    with fake_pipeline() as pipe:
        return set(create_app(service_on(pipe)).openapi()["paths"])


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_for_routes_that_there_are(probe, paths):
    asked = container()[probe]["httpGet"]
    assert asked["path"] in paths
    assert asked["path"] == ("/health/ready" if probe == "readinessProbe" else "/health/live")
    assert asked["port"] == container()["ports"][0]["name"]


def test_with_tls_the_server_has_a_certificate_and_probes_ask_for_it():
    spec = documents(TLS)[0]["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    files = {"ssl_certfile": "/tls/tls.crt", "ssl_keyfile": "/tls/tls.key"}
    assert server["name"] == container()["name"]
    assert server["args"][:-2] == container()["args"]
    values = command_of([*json.loads(instruction("ENTRYPOINT")), *server["args"]]).params
    assert {name: values[name] for name in files} == files
    (mount,), (volume,) = server["volumeMounts"], spec["volumes"]
    assert mount["name"] == volume["name"]
    assert {str(Path(path).parent) for path in files.values()} == {mount["mountPath"]}
    assert volume["secret"]["secretName"] in (DEPLOY / "README.md").read_text()
    probes = {name: one for name, one in server.items() if name.endswith("Probe")}
    assert probes == {name: {"httpGet": {"scheme": "HTTPS"}} for name in container() if name.endswith("Probe")}


def test_a_pod_has_time_to_drain():
    pause_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = pod()["terminationGracePeriodSeconds"]
    assert grace_s > pause_s + server_command().params["drain_s"] + 10


def test_a_start_has_minutes_and_a_stuck_engine_is_not_waited_for():
    startup, live = container()["startupProbe"], container()["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert live["timeoutSeconds"] <= live["periodSeconds"]
    pause_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause_s < live["terminationGracePeriodSeconds"] < pod()["terminationGracePeriodSeconds"] / 2


def test_another_replica_starts_at_85_per_cent_of_the_pool():
    spec = resources()["HorizontalPodAutoscaler"]["spec"]
    target = spec["scaleTargetRef"]
    assert resources()[target["kind"]]["metadata"]["name"] == target["name"]
    (metric,) = spec["metrics"]
    assert metric["pods"] == {
        "metric": {"name": GUIDES_NAME},
        "target": {"type": "AverageValue", "averageValue": "850m"},
    }
    assert "replicas" not in resources()["Deployment"]["spec"], "two would have a say"
    (rule,) = documents(DEPLOY / "prometheus/adapter.yaml")[0]["rules"]
    assert rule["name"]["matches"] == GUIDES_NAME
    labels = {one.get("target_label") for one in scrape()["relabel_configs"]}
    assert rule["resources"]["overrides"].keys() <= labels


def scrape() -> dict[str, Any]:
    (only,) = documents(DEPLOY / "prometheus/scrape.yaml")[0]["scrape_configs"]
    assert isinstance(only, dict)
    return only


# -- metrics ----------------------------------------------------------------------------------------------

SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
# Words of PromQL that are no names of series.
WORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "bool", "offset"}


def series() -> dict[str, set[str]]:
    """Every name that can be asked for, and its labels, by the documentation, which is tested against the server."""
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/metrics.md").read_text().splitlines() if "| `" in line]
    found = {}
    for name, kind, labels, _ in rows:
        for suffix in SUFFIXES[kind.strip()]:
            found[name.strip(" `") + suffix] = {label.strip() for label in labels.split(",") if label.strip()}
    return found


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """Series and grouping labels of a query."""
    grouping = re.findall(r"\b(?:by|without) \(([^)]*)\)", expression)
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without) \([^)]*\)", " ", expression)
    rest = re.sub(r"\b[a-z_]+\s*\(", "(", rest)  # functions
    names = set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_]*", rest)) - WORDS
    return names, {label.strip() for group in grouping for label in group.split(",")}


def queries() -> list[str]:
    alerts = [
        rule["expr"] for group in documents(DEPLOY / "prometheus/alerts.yaml")[0]["groups"] for rule in group["rules"]
    ]
    return alerts + [target["expr"] for panel in panels() for target in panel["targets"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    return board


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("expression", queries())
def test_every_query_asks_for_series_that_there_are(expression):
    names, grouping = names_in(expression)
    assert names, "it asks for nothing"
    assert names <= series().keys()
    labels = set.union({"job", "pod", "namespace", "le"}, *(series()[name] for name in names))
    assert grouping <= labels
    assert expression.count("(") == expression.count(")")


def test_names_are_told_from_everything_else_in_a_query():
    query = 'histogram_quantile(0.5, sum by (le, pod) (rate(a_bucket{b="c"}[5m]))) / max(d) > 1'
    assert names_in(query) == ({"a_bucket", "d"}, {"le", "pod"})


def test_the_dashboard_shows_what_operators_ask_for_first():
    asked = set.union(*(names_in(target["expr"])[0] for panel in panels() for target in panel["targets"]))
    assert {GUIDES_NAME, "request_queue_latency_bucket", "gpu_tensor_core_utilization"} <= asked
    shown = {name.removesuffix("_bucket").removesuffix("_total") for name in asked}
    all_names = {re.sub("_(total|bucket|sum|count)$", "", name) for name in series()}
    assert {name for name in all_names - shown if not name.startswith("process_")} <= {
        "turbojax_info", "turbojax_compilations",
    }  # fmt: skip


def test_panels_have_their_place_and_their_own_number():
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    areas = [panel["gridPos"] for panel in everything]
    assert all(area["x"] + area["w"] <= 24 for area in areas)
    for a, b in combinations(areas, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels())


def test_variables_are_declared():
    declared = {variable["name"] for variable in dashboard()["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) <= declared


# -- all of it --------------------------------------------------------------------------------------------


def test_every_file_is_read_here():
    names = ("Dockerfile", "Dockerfile.dockerignore", "README.md", "grafana/dashboard.json")
    known = {*MANIFESTS, *PROMETHEUS, TLS, *(DEPLOY / name for name in names)}
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} == known
    assert all(documents(path) for path in (*MANIFESTS, *PROMETHEUS))


@pytest.mark.parametrize("path", [*sorted(DEPLOY.rglob("*.*")), DEPLOY / "Dockerfile"], ids=lambda path: path.name)
def test_no_address_of_anybodys_machines(path):
    urls = re.findall(r"https?://([^/\s'\"]+)", path.read_text())
    assert set(urls) <= {f"127.0.0.1:{DEFAULT_PORT}"}

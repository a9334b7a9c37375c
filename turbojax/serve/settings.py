"""What the command line says of the server: ServeConfig."""

from __future__ import annotations

from dataclasses import dataclass

from turbojax.rules import check, is_int

DEFAULT_PORT = 23333  # LMDeploy's


@dataclass(frozen=True)
class ServeConfig:
    """How the server runs. Names follow LMDeploy's `serve api_server`.

    Attributes:
        server_name: the address to listen at; the default is this machine alone.
        server_port: 0 takes a free one.
        model_name: what clients call the model; None is its folder's or repository's name.

    Raises:
        ConfigError: a field is out of range.
    """

    server_name: str = "127.0.0.1"
    server_port: int = DEFAULT_PORT
    model_name: str | None = None

    def __post_init__(self) -> None:
        rules = {
            "server_name": (isinstance(self.server_name, str) and self.server_name != "", "an address or host name"),
            "server_port": (is_int(self.server_port, 0, 65535), "an int of 0 .. 65535 (0 takes a free port)"),
            "model_name": (
                self.model_name is None or (isinstance(self.model_name, str) and self.model_name != ""),
                "None or a text that is not empty",
            ),
        }
        check("ServeConfig", self, rules)

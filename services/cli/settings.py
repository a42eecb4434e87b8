"""Where the controller is, read from the environment once."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.jobs.code_archives import DEFAULT_CODE_MIB


class CliSettings(BaseSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; docs/configuration.md lists them."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", extra="ignore")

    url: str | None = Field(
        default=None, description="The controller's address; unset: 127.0.0.1 and the port."
    )
    port: int = Field(default=8400, description="The controller's port, where no address is set.")
    token: str | None = Field(default=None, description="The bearer token to send.")
    max_code_mib: int = Field(
        default=DEFAULT_CODE_MIB,
        description="The largest code archive that `--code` uploads, in MiB; the controller has its own limit.",
    )

    @property
    def base_url(self) -> str:
        """The controller's root, without a slash at its end."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")

"""Where the controller is, read from the environment once."""

from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.jobs.code_archives import DEFAULT_CODE_MIB


class CliSettings(BaseSettings):
    """The client's settings: ``MESHLOOM_URL`` (else the local ``MESHLOOM_PORT``) and token.

    ``max_code_mib`` is how large an archive of code may be; the controller has its own limit.
    """

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", extra="ignore")

    url: str | None = None
    port: int = 8400
    token: str | None = None
    max_code_mib: int = DEFAULT_CODE_MIB

    @property
    def base_url(self) -> str:
        """The controller's root, without a slash at its end."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")

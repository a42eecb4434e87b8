"""Secrets in the arguments of a spec: named by ``{"secret": "NAME"}``, never written out."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.contract.words.problems import Fault

SECRET_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_KEY: Final = "secret"
# Words such as pad_token or eos_token are no credentials.
_CREDENTIAL: Final = re.compile(
    r"(^|_)(password|passwd|pwd|passphrase|secret|credential|authorization"
    r"|(api|access|secret|private)_?key(_id)?)s?$"
    r"|(^|_)(auth|access|api|hf|hub|bearer|refresh|session|security|oauth|personal|bot|slack"
    r"|git(hub|lab)|wandb)_?tokens?$|^token$",
    re.IGNORECASE,
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# As GitHub, GitLab, Hugging Face, OpenAI, Slack, AWS, Google and this controller make them; private
# keys; JSON Web Tokens; values of the header Authorization. A token begins where its letters do: were
# it looked for at every `eyJ` among them, the time would grow with the square of a text's length.
_KNOWN_SHAPE: Final = re.compile(
    r"\b(gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|sk-[\w-]{20,}|xox[abeoprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{35}|mlt_\w{26}_[\w-]{20,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\."
    r"|^(Bearer|Basic) +[\w+/=.~-]{8,}$"
)
_URL_WITH_PASSWORD: Final = re.compile(r"://[^/\s@:]*:[^/\s@]+@")
_ADVICE: Final = (
    'write {"secret": "NAME"} instead, and put the value into the file NAME in '
    "MESHLOOM_SECRETS_DIR on the nodes: every viewer can read specs"
)


def references(args: object) -> Iterator[str]:
    """The names of the secrets that arguments refer to."""
    if _is_reference(args):
        yield str(args[_KEY])  # type: ignore[index] # a reference is a dict
    elif isinstance(args, dict):
        for value in args.values():
            yield from references(value)
    elif isinstance(args, list | tuple):
        for value in args:
            yield from references(value)


def resolved(args: Any, values: Mapping[str, str]) -> Any:  # noqa: ANN401 free-form JSON
    """Arguments with the values in place of the references.

    Raises:
        KeyError: A secret has no value.
    """
    if _is_reference(args):
        return values[args[_KEY]]
    if isinstance(args, dict):
        return {key: resolved(value, values) for key, value in args.items()}
    if isinstance(args, list | tuple):
        return [resolved(value, values) for value in args]
    return args


def written_out(args: object, pointer: str) -> Iterator[Fault]:
    """Every argument that looks like a credential itself, and every reference that is none.

    Args:
        args: The arguments.
        pointer: Where they stand, as a JSON pointer.
    """
    if _is_reference(args):
        return
    if isinstance(args, dict):
        for key, value in args.items():
            place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            if _is_credential(key) and _is_written(value):
                yield _fault(place, f"{key!r} looks like a credential; {_ADVICE}")
            else:
                yield from written_out(value, place)
    elif isinstance(args, list | tuple):
        for index, value in enumerate(args):
            yield from written_out(value, f"{pointer}/{index}")
    elif isinstance(args, str) and _URL_WITH_PASSWORD.search(args):
        yield _fault(pointer, f"a URL with a password in it; {_ADVICE}")
    elif isinstance(args, str) and _KNOWN_SHAPE.search(args):
        yield _fault(pointer, f"this looks like a credential; {_ADVICE}")


def looks_secret(name: str, value: object) -> bool:
    """Whether a value of this name may be a credential: then no error shows it."""
    return next(written_out({name: value}, ""), None) is not None


def _is_credential(key: str) -> bool:
    words = _CAMEL.sub("_", key)
    return _CREDENTIAL.search(re.sub(r"[-. ]", "_", words)) is not None


def _is_written(value: object) -> bool:
    """Whether there is a text, alone or in a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, str) and each for each in values)


def _is_reference(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {_KEY}
        and isinstance(value[_KEY], str)
        and SECRET_NAME.fullmatch(value[_KEY]) is not None
    )


def _fault(pointer: str, detail: str) -> Fault:
    return Fault(pointer=pointer, detail=detail, code="credential_written_out")

"""Secrets that are plain words of commands, and words that have to stay as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.key.keying import make_key
from bootseer.env.parse.redaction import SECRET, looks_secret
from bootseer.env.parse.redaction_commands import redact_command
from bootseer.env.spec import SetupSpec

PLACES = [
    "wandb login {0}",
    "wandb login --relogin {0}",
    "sudo -E wandb login {0}",
    "sh -c 'wandb login {0} && pip install a==1'",
    "aws configure set aws_secret_access_key {0}",
    "poetry config pypi-token.corp {0}",
    "poetry config http-basic.corp me {0}",
    "npm config set //registry/:_authToken {0}",
    "docker login -u me -p {0} registry",
    "docker login -p{0} registry",
    "docker login --password-stdin registry <<< {0}",
    "sshpass -p {0} scp h:/x .",
    "mysql -uroot -p{0}",
    "echo {0} | docker login --password-stdin registry",
    "echo -n '{0}' | gh auth login --with-token",
    "printf '{0}' > ~/.cache/huggingface/token",
    "echo {0} | tee ~/.cache/huggingface/token",
    "echo 'machine h login me password {0}' > ~/.netrc",
    "gcloud auth activate-refresh-token me {0}",
    "X=1 tool token {0}",
    "snyk auth {0}",
    "unzip -P {0} a.zip",
    "mc alias set name https://h me {0}",
]
secrets = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=_.:!%", min_size=8).map(
    lambda text: f"Zq{text}Zq"
)


@pytest.mark.parametrize("place", PLACES)
@given(secret=secrets)
def test_words_that_only_their_program_tells(place: str, secret: str) -> None:
    found = redact_command(place.format(secret))
    assert secret not in found
    assert SECRET in found


@pytest.mark.parametrize(
    "command",
    [
        "pip install -r requirements.txt secretstorage 'foo>=1,<2' && echo ok > done.txt",
        "conda install tokenizers=0.15 secretstorage=3.3.1 passlib=1.7.4=py_0",
        "docker run -p 8080:80 image",
        "gcloud auth login && gh auth status",
        "gh auth login --with-token < file",
        "mysql -u root -p database",
        "wandb login $WANDB_API_KEY",
        'echo "$TOKEN" | docker login --password-stdin registry',
        "aws configure set region eu-west-1",
        "python make_key.py v1",
        "cp key v1; git checkout token v2",
        "uv pip install key token pass 2>&1 | tee log",
    ],
)
def test_what_is_no_secret_stays(command: str) -> None:
    """Hidden, two different versions would have one key."""
    assert redact_command(command) == command


@given(st.text("ab -|;&<>()\"'\\$\n", max_size=60))
def test_whatever_is_written_is_understood_somehow(text: str) -> None:
    assert redact_command(f"tool {text}").startswith("tool")


def test_what_may_be_a_secret_is_reported(tmp_path: object) -> None:
    assert looks_secret("tool --x 4fYh1kQ9zRt7WvB2mNc8")
    for text in (
        "pip install a==1 --hash sha256:" + "0a" * 32,
        "git clone https://h/o/SomeLongRepositoryName2024.git",
        "python /opt/Some/Long/Path/To/A/File123.py",
        "pip install a_long_package_name_v2==1.0",
    ):
        assert not looks_secret(text), text
    spec = SetupSpec(commands=("tool --x 4fYh1kQ9zRt7WvB2mNc8",), targets=(f"{tmp_path}/venv",), cwd=str(tmp_path))
    (note,) = [note for note in make_key(spec, {}).notes if "seems to be a secret" in note]
    assert "4fYh1kQ9zRt7WvB2mNc8" not in note

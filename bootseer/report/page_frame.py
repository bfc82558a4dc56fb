"""PURE: the frame of Bootseer's HTML pages; they load nothing, and only scripts with a listed checksum run."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from string import Template


def framed(title: str, body: str, *, style: str, script: str = "", data: str = "") -> bytes:
    """Return the page as UTF-8. Args: title, body: HTML; style, script: file names; data: input of the script."""
    css, code = asset(style), asset(script) if script else ""
    policy = f"style-src 'sha256-{checksum(css)}'"
    scripts = ""
    if script:
        policy += f"; script-src 'sha256-{checksum(code)}'"
        scripts = f'<script type="application/json" id="data">{data}</script>\n<script>{code}</script>\n'
    text = Template(asset("frame.html")).substitute(
        POLICY=policy, TITLE=title, STYLE=css, BODY=body, SCRIPTS=scripts
    )
    return text.encode("utf-8", "replace")


def asset(name: str) -> str:
    """Return a file of this directory as text."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def checksum(text: str) -> str:
    """Return the checksum in the form of a Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

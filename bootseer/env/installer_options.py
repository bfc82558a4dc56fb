"""PURE: options of installers that take a value, by what the value is; "" where it decides nothing by itself.

pip 26, uv 0.9, conda 25. An option that is missing here makes its value look like a package that is not pinned: a
note too many and an earlier expiry, never a wrong environment.
"""

from __future__ import annotations

from bootseer.env.requirements import FILE_OPTIONS

_WITHOUT_FILES = (
    *(
        "-t",
        "--target",
        "--platform",
        "--python-version",
        "--implementation",
        "--abi",
        "--root",
        "--prefix",
        "--src",
    ),
    *(
        "--upgrade-strategy",
        "-C",
        "--config-settings",
        "--config-setting",
        "--global-option",
        "--no-binary",
        "--hash",
    ),
    *("--only-binary", "--progress-bar", "--root-user-action", "--report", "-i", "--index-url", "--pypi-url"),
    *("--extra-index-url", "--log", "--log-file", "--keyring-provider", "--proxy", "--retries", "--timeout"),
    *("--exists-action", "--trusted-host", "--cert", "--client-cert", "--cache-dir", "--use-feature", "--python"),
    *("--use-deprecated", "--install-option", "--uploaded-prior-to", "--resume-retries", "--all-releases"),
    *("--only-final", "--default-timeout"),
)
PIP = {
    **FILE_OPTIONS,
    **dict.fromkeys(_WITHOUT_FILES, ""),
    **dict.fromkeys(("--build-constraint", "--build-constraints"), "constraint"),
    "--group": "group",
    "--requirements-from-script": "file",
}
UV = {
    **PIP,
    **dict.fromkeys(("-p", "--index", "--default-index", "--index-strategy", "-P", "--upgrade-package"), ""),
    **dict.fromkeys(("--reinstall-package", "--refresh-package", "--resolution", "--prerelease"), ""),
    **dict.fromkeys(("--fork-strategy", "--config-settings-package", "--no-build-isolation-package"), ""),
    **dict.fromkeys(("--exclude-newer", "--exclude-newer-package", "--link-mode", "--python-platform"), ""),
    **dict.fromkeys(("--torch-backend", "--color", "--allow-insecure-host", "--python-preference"), ""),
    **dict.fromkeys(("--no-build-package", "--no-binary-package", "--no-install-package", "--package"), ""),
    **dict.fromkeys(("--no-group", "--only-group", "--no-extra", "--upgrade-group", "--env-file", "--with"), ""),
    **dict.fromkeys(("--override", "--overrides", "--exclude", "--excludes", "-b", "--config-file"), "file"),
    "--extra": "extra",
    **dict.fromkeys(("--project", "--directory"), "project"),
}
CONDA = {
    **dict.fromkeys(
        ("-n", "--name", "-p", "--prefix", "-c", "--channel", "--solver", "--subdir", "--platform"), ""
    ),
    **dict.fromkeys(("--revision", "--repodata-fn", "--clone", "--experimental", "-r", "--root-prefix"), ""),
    **dict.fromkeys(("--file", "-f"), "file"),
}

"""Build what is handed on: `make dist`. One commit gives the same bytes whenever, wherever and by whomever it is built.

`dist/` then has an archive of the source, a wheel, a bill of materials (CycloneDX) and their checksums.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HASHES = "constraints-hashes.txt"
HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(out: Path) -> list[Path]:
    """Build the last commit in a folder; return the archive of the source and the wheel, which is made from it."""
    git = ["git", "-c", "tar.umask=0022", "-C", str(ROOT)]
    time = subprocess.run(
        [*git, "log", "-1", "--format=%ct"], check=True, capture_output=True, text=True
    ).stdout.strip()
    tree = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time}
    before = os.umask(0o022)  # modes of files are in the archives
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "source")
            with tarfile.open(fileobj=io.BytesIO(tree)) as tar:
                tar.extractall(source, filter="tar")  # its links stay links
            _run_hook("build_sdist", out, source, environment)
            (sdist,) = out.glob("*.tar.gz")
            normalize(sdist, int(time))
            with tarfile.open(sdist) as tar:
                tar.extractall(folder, filter="data")
            (extracted,) = Path(folder).glob("fedlightning-*")
            _run_hook("build_wheel", out, extracted, environment)
    finally:
        os.umask(before)
    return [sdist, *out.glob("*.whl")]


def _run_hook(name: str, out: Path, source: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", HOOK, name, str(out.resolve())]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} of setuptools failed:\n{done.stdout}{done.stderr}")


def normalize(archive: Path, time: int) -> None:
    """Take out of an archive who packed it, when, and in which order."""
    packed = io.BytesIO()
    with tarfile.open(archive) as before, tarfile.open(fileobj=packed, mode="w") as after:
        for member in sorted(before, key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = time, {}
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=time))


def main() -> None:
    """Build into `dist/`, check, and write the bill of materials and the checksums."""
    out = ROOT / "dist"
    out.mkdir(exist_ok=True)
    for path in out.iterdir():
        path.unlink()
    files = build(out)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
    bill = out / f"{files[0].name.removesuffix('.tar.gz')}.cdx.json"
    words = [HASHES, "--pyproject", "pyproject.toml", "--mc-type", "library", "--output-reproducible", "-o", str(bill)]
    subprocess.run([sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", *words], cwd=ROOT, check=True)
    content = json.loads(bill.read_text())
    content["metadata"]["component"]["version"] = bill.name.split("-")[1].removesuffix(
        ".cdx.json"
    )  # it reads no dynamic one
    bill.write_text(json.dumps(content, indent=1) + "\n")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (*files, bill)]
    (out / "SHA256SUMS").write_text("".join(lines))
    print("".join(lines), end="")


if __name__ == "__main__":
    main()

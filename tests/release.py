"""Freeze the template of this version: python -m tests.release

It adds ddpgen/history/vX.Y.Z.fi, which is never changed again, and the commit that comes of it to
tests/history.txt. Run it through `make release`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from ddpgen import git, store

ROOT = Path(__file__).resolve().parent.parent


def frozen(root: Path) -> dict[str, bytes]:
    """Return the releases of a checkout in their order."""
    files = sorted((root / "ddpgen/history").glob("v*.fi"), key=lambda f: store.version(f.stem))
    return {file.stem: file.read_bytes() for file in files}


def version_of(root: Path) -> str:
    """Return the version of a checkout, as a tag."""
    text = (root / "ddpgen/__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return f"v{found}"


def freeze(root: Path) -> str:
    """Freeze the template of a checkout; return its tag and its commit as a line of history.txt.

    Raises:
        SystemExit: If this version is frozen already, or is not newer than the last one.
    """
    tag, before = version_of(root), frozen(root)
    if before and store.version(tag) <= store.version(list(before)[-1]):
        raise SystemExit(f"{tag} is not newer than {list(before)[-1]}, which is frozen.")
    files = store.template_files(root)
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "repository"
        store.load(repository, before, store.commit(tag, len(before) + 1, files))
        commit = git.run(repository, "rev-parse", "main")
        piece = store.commit(tag, len(before) + 1, files)
        if before:
            # Only what has changed: a release takes little room, and is readable.
            last = list(before)[-1]
            names = ("diff", "--name-only", "--no-renames", "-z", last, "main")
            changed = git.words(git.run(repository, *names))
            piece = store.commit(
                tag,
                len(before) + 1,
                {name: files[name] for name in changed if name in files},
                removed=[name for name in changed if name not in files],
            )
    (root / "ddpgen/history").mkdir(exist_ok=True)
    (root / f"ddpgen/history/{tag}.fi").write_bytes(piece)
    line = f"{tag} {commit.decode().strip()}"
    with (root / "tests/history.txt").open("a") as pins:
        pins.write(f"{line}\n")
    return line


if __name__ == "__main__":
    print(freeze(ROOT))
    sys.exit()

"""Write the page of ``bridge-memory serve`` as static files for any host: the estimate runs in the visitor's browser.

    npm pack pyodide
    python scripts/build_static_site.py --pyodide pyodide-*.tgz --output site
    python -m http.server --directory site

Needs ``--pyodide``, the npm package ``pyodide`` (its .tgz or its folder). Writes only the folder ``--output``: the page
of ``bridge_memory/web``, its backend ``scripts/static_site``, Pyodide's interpreter and standard library, and the
licences of each (Pyodide: MPL-2.0; CPython's). The page loads nothing from other hosts. A search evaluates layouts one
by one, without numpy; a stopped search shows no rows.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bridge_memory"
OWN = Path(__file__).resolve().parent / "static_site"
#: Files of the npm package that a browser loads.
INTERPRETER = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
#: Files of this package that an estimate reads.
SUFFIXES = (".py", ".json", ".js", ".css", ".html")
#: No other hosts, no other scripts; WebAssembly may be compiled.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder. Returns 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pyodide", type=Path, required=True, metavar="TGZ", help="the npm package, or its folder")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="must not exist or be empty")
    args = parser.parse_args(argv)
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        print(f"error: --output {args.output} is not an empty folder; name another", file=sys.stderr)
        return 2
    try:
        interpreter = _interpreter(args.pyodide)
    except (OSError, KeyError, tarfile.TarError) as error:
        why = " ".join(str(error).split())[:120]
        print(f"error: --pyodide {args.pyodide} is no npm package of Pyodide ({why}); `npm pack pyodide` gets it",
              file=sys.stderr)  # fmt: skip
        return 2
    site = args.output
    shutil.copytree(PACKAGE / "web" / "page", site)
    (site / "api.js").rename(site / "server_api.js")
    for file in OWN.iterdir():
        shutil.copy(file, site / file.name)
    (site / "report").mkdir()
    for name in ("charts.js", "plots.js", "rollout.js", "style.css"):
        shutil.copy(PACKAGE / "report" / "page" / name, site / "report" / name)
    index = (site / "index.html").read_text(encoding="utf-8")
    head = '<meta charset="utf-8">\n'
    assert head in index, "index.html begins with its encoding"
    policy = f'{head}<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    (site / "index.html").write_text(index.replace(head, policy), encoding="utf-8")
    (site / "bridge_memory.zip").write_bytes(_package())
    shutil.copy(ROOT / "LICENSE", site / "LICENSE")
    (site / "pyodide").mkdir()
    for name, data in interpreter.items():
        (site / "pyodide" / name).write_bytes(data)
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    print(f"wrote {site}: {size / 1e6:.1f} MB; serve it with any web server, such as python -m http.server -d {site}")
    return 0


def _interpreter(source: Path) -> dict[str, bytes]:
    """Name -> bytes of the needed files, with those that state the licence. Raises OSError, KeyError, TarError."""
    names = (*INTERPRETER, "package.json", "README.md")
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in names}
    with tarfile.open(source) as archive:
        files = {}
        for name in names:
            file = archive.extractfile(f"package/{name}")
            if file is None:
                raise KeyError(name)
            files[name] = file.read()
        return files


def _package() -> bytes:
    """A zip of the folder ``bridge_memory``; equal files give equal bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(PACKAGE.rglob("*")):
            if file.suffix in SUFFIXES and "__pycache__" not in file.parts and "web/page" not in file.as_posix():
                info = zipfile.ZipInfo(file.relative_to(ROOT).as_posix(), (2020, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, file.read_bytes())
    return data.getvalue()


if __name__ == "__main__":
    sys.exit(main())

"""Which Python code goes into an image: its requirements, and its half of our one wheel.

Both Dockerfiles run this file as a script, and the archive builder imports it, so the two kinds of image cannot differ.
It therefore imports the standard library only and works in an image that has nothing but Debian's Python 3.11.

    images_wheel.py requirements IMAGE          print the requirements of an image, one a line
    images_wheel.py split IMAGE WHEEL OUTDIR    write the image's half of WHEEL into OUTDIR
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import io
import sys
import tomllib
import zipfile
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS = "entry_points.txt"


def requirements(repo_root: Path, image: str) -> list[str]:
    """The requirement lines of `image`: the project's own and those of the image's extra."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    spec = _image_table(repo_root, image)
    return [*project["dependencies"], *project["optional-dependencies"][spec["extra"]]]


def split_wheel(repo_root: Path, image: str, wheel: Path, out_dir: Path) -> Path:
    """Copies `wheel` into `out_dir` with only the import packages of `image` and the console scripts that they serve.

    The result is a well-formed wheel of the same name (RECORD is made anew), so pip installs it as the distribution
    `llmtrain`; its metadata is untouched. Its bytes depend on the input wheel alone.
    """
    packages = _image_table(repo_root, image)["packages"]
    out = out_dir / wheel.name
    out_dir.mkdir(parents=True, exist_ok=True)
    record: list[str] = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            top, _, rest = info.filename.partition("/")
            in_metadata = top.endswith(".dist-info")
            if not in_metadata and top not in packages:
                continue
            if in_metadata and rest == "RECORD":
                record_info = info
                continue
            data = source.read(info)
            if in_metadata and rest == ENTRY_POINTS:
                data = _entry_points_for(data.decode(), packages).encode()
            target.writestr(info, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{info.filename},sha256={digest},{len(data)}")
        record.append(f"{record_info.filename},,")
        target.writestr(record_info, "\n".join(record) + "\n")
    return out


def entry_points(text: str) -> configparser.ConfigParser:
    """Parses an entry_points.txt (names keep their case; `=` is the only delimiter, since values hold colons)."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return parser


def _entry_points_for(text: str, packages: list[str]) -> str:
    parser = entry_points(text)
    for section in parser.sections():
        for name, value in list(parser.items(section)):
            if value.split(":")[0].split(".")[0].strip() not in packages:
                parser.remove_option(section, name)
        if not parser.options(section):
            parser.remove_section(section)
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def _image_table(repo_root: Path, image: str) -> dict[str, list[str]]:
    images = tomllib.loads((repo_root / "kind" / "images" / "images.toml").read_text())["image"]
    if image not in images:
        raise SystemExit(f"unknown image {image!r}; kind/images/images.toml has: {', '.join(sorted(images))}")
    table: dict[str, list[str]] = images[image]
    return table


def main(argv: list[str]) -> int:
    """Entry point of the Dockerfiles."""
    match argv:
        case ["requirements", image]:
            print("\n".join(requirements(REPO_ROOT, image)))
        case ["split", image, wheel, out_dir]:
            print(split_wheel(REPO_ROOT, image, Path(wheel), Path(out_dir)))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The parts of the image builder that need neither root nor a network: the wheel's halves, OCI, the cache."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from llmtrain_kind import images, images_layers, images_tools, images_wheel
from llmtrain_kind.errors import ClusterError
from llmtrain_kind.images_oci import EPOCH, ImageConfig, keep_owner, own_files, write_archive, write_layer
from llmtrain_kind.images_spec import ImageError, load_spec

ROOT = Path(__file__).resolve().parents[3]
SPEC = load_spec(ROOT)
IMAGES = sorted(SPEC.images)


def silent(line: str) -> None:
    """Progress that nobody reads."""


# --- requirements and the wheel's halves ---


def test_requirements_are_the_projects_own_and_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for image in IMAGES:
        extra = project["optional-dependencies"][SPEC.images[image].extra]
        assert images_wheel.requirements(ROOT, image) == [*project["dependencies"], *extra]


def test_the_operator_needs_no_torch_and_the_trainer_mounts_it() -> None:
    assert not any(line.startswith("torch") for line in images_wheel.requirements(ROOT, "operator"))
    assert any(line.startswith("torch") for line in images_wheel.requirements(ROOT, "trainer"))
    assert SPEC.images["trainer"].mounted == ("torch",)


def make_wheel(path: Path) -> Path:
    members = {
        "llmtrain_api/__init__.py": "",
        "llmtrain_operator/__init__.py": "",
        "llmtrain_operator/data.json": "{}",
        "llmtrain_trainer/__init__.py": "",
        "llmtrain-1.dist-info/METADATA": "Metadata-Version: 2.4\nName: llmtrain\nVersion: 1\n",
        "llmtrain-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "llmtrain-1.dist-info/entry_points.txt": (
            "[console_scripts]\nkubectl-llmtrain = llmtrain_operator.cli:main\n"
            "llmtrain-agent = llmtrain_trainer.agent:main\n"
        ),
        "llmtrain-1.dist-info/RECORD": "stale\n",
    }
    wheel = path / "llmtrain-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return wheel


@pytest.mark.parametrize(
    ("image", "package", "other", "script"),
    [
        ("operator", "llmtrain_operator", "llmtrain_trainer", "kubectl-llmtrain = llmtrain_operator.cli:main"),
        ("trainer", "llmtrain_trainer", "llmtrain_operator", "llmtrain-agent = llmtrain_trainer.agent:main"),
    ],
)
def test_split_wheel_keeps_one_side_and_its_scripts(
    tmp_path: Path, image: str, package: str, other: str, script: str
) -> None:
    half = images_wheel.split_wheel(ROOT, image, make_wheel(tmp_path), tmp_path / "out")
    with zipfile.ZipFile(half) as archive:
        names = archive.namelist()
        scripts = archive.read("llmtrain-1.dist-info/entry_points.txt").decode()
        record = archive.read("llmtrain-1.dist-info/RECORD").decode().splitlines()
        assert scripts.split("\n")[:2] == ["[console_scripts]", script]
        assert len(scripts.strip().splitlines()) == 2
        assert f"{package}/__init__.py" in names and "llmtrain_api/__init__.py" in names
        assert not any(name.startswith(other) for name in names)
        assert [line.split(",")[0] for line in record] == names
        for line in record[:-1]:
            name, digest, size = line.split(",")
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(data))


def test_the_dockerfiles_script_runs_without_the_package_installed() -> None:
    script = ROOT / "kind/llmtrain_kind/images_wheel.py"
    done = subprocess.run([sys.executable, "-I", script, "requirements", "trainer"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == images_wheel.requirements(ROOT, "trainer")
    refused = subprocess.run([sys.executable, "-I", script, "requirements", "nobody"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.strip() == "unknown image 'nobody'; kind/images/images.toml has: operator, trainer"


def test_console_scripts_run_the_image_python_and_drop_the_builders_own(tmp_path: Path) -> None:
    site = tmp_path / SPEC.site_packages
    metadata = site / "tool-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text(
        "[console_scripts]\nplain = tool.cli:main\nnested = tool:App.run [extra]\n"
    )
    (site / "bin").mkdir()
    (site / "bin" / "plain").write_text("#!/builder/python\n")
    images_layers._console_scripts(tmp_path, SPEC)
    bin_dir = tmp_path / SPEC.prefix.lstrip("/") / "bin"
    assert not (site / "bin").exists()
    assert sorted(path.name for path in bin_dir.iterdir()) == ["nested", "plain"]
    assert (bin_dir / "plain").stat().st_mode & 0o777 == 0o755
    lines = (bin_dir / "nested").read_text().splitlines()
    assert lines[0] == f"#!{SPEC.prefix}/bin/python3"
    assert lines[3:] == ["from tool import App", "", "sys.exit(App.run())"]


# --- OCI layers and archives ---


def make_tree(root: Path, mtime: int) -> Path:
    (root / "opt" / "app").mkdir(parents=True)
    (root / "dev").mkdir()
    (root / "dev" / "leftover").write_text("a device node would be here")
    (root / "opt" / "app" / "code.py").write_text("x = 1\n")
    (root / "opt" / "app" / "run").write_text("#!/bin/sh\n")
    (root / "opt" / "app" / "run").chmod(0o700)
    (root / "opt" / "link").symlink_to("/opt/app")
    for path in root.rglob("*"):
        os.utime(path, (mtime, mtime), follow_symlinks=False)
    return root


def test_layer_depends_on_content_only(tmp_path: Path) -> None:
    first = write_layer(make_tree(tmp_path / "a", 1_600_000_000), tmp_path / "a.tar", own_files)
    second = write_layer(make_tree(tmp_path / "b", 1_700_000_000), tmp_path / "b.tar", own_files)
    assert first.digest == second.digest
    (tmp_path / "b" / "opt" / "app" / "code.py").write_text("x = 2\n")
    assert write_layer(tmp_path / "b", tmp_path / "c.tar", own_files).digest != first.digest


def test_layer_of_ours_is_readable_by_anyone_and_writable_by_nobody_else(tmp_path: Path) -> None:
    layer = write_layer(make_tree(tmp_path / "a", 1_600_000_000), tmp_path / "a.tar", own_files)
    with tarfile.open(layer.tar) as tar:
        members = {info.name: info for info in tar}
    assert sorted(members) == ["dev", "opt", "opt/app", "opt/app/code.py", "opt/app/run", "opt/link"]
    assert {info.mtime for info in members.values()} == {EPOCH}
    assert {(info.uid, info.gid, info.uname) for info in members.values()} == {(0, 0, "")}
    assert [members[f"opt/app/{name}"].mode for name in ("code.py", "run")] == [0o644, 0o755]
    assert members["opt/link"].linkname == "/opt/app"


def test_base_layer_keeps_times_that_bytecode_records(tmp_path: Path) -> None:
    layer = write_layer(make_tree(tmp_path / "a", 1_600_000_000), tmp_path / "a.tar", keep_owner)
    with tarfile.open(layer.tar) as tar:
        assert tar.getmember("opt/app/code.py").mtime == 1_600_000_000
        assert tar.getmember("opt/app/run").mode == 0o700


def contents(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    """The bytes of a regular member."""
    source = tar.extractfile(info)
    assert source is not None
    return source.read()


CONFIG = ImageConfig("65532:65532", ("/bin/app", "run"), {"A": "1", "B": "x=y"}, "/home/app", {"title": "app"})


def test_archive_is_a_valid_oci_layout_under_all_its_names(tmp_path: Path) -> None:
    layer = write_layer(make_tree(tmp_path / "a", 1_600_000_000), tmp_path / "a.tar", own_files)
    out = tmp_path / "image.tar"
    assert write_archive(out, ["localhost/app:dev", "localhost/app:1.0"], [layer], CONFIG)
    with tarfile.open(out) as tar:
        blobs = {info.name: contents(tar, info) for info in tar}
    assert json.loads(blobs["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(blobs["index.json"])["manifests"]
    assert [entry["annotations"]["io.containerd.image.name"] for entry in index] == [
        "localhost/app:dev",
        "localhost/app:1.0",
    ]

    def blob(descriptor: dict[str, object]) -> bytes:
        data = blobs["blobs/" + str(descriptor["digest"]).replace(":", "/")]
        assert len(data) == descriptor["size"]
        assert "sha256:" + hashlib.sha256(data).hexdigest() == descriptor["digest"]
        return data

    manifest = json.loads(blob(index[0]))
    assert index[0]["digest"] == index[1]["digest"]
    config = json.loads(blob(manifest["config"]))
    assert config["rootfs"]["diff_ids"] == [layer.digest]
    assert config["config"] == {
        "User": "65532:65532",
        "Env": ["A=1", "B=x=y"],
        "Entrypoint": ["/bin/app", "run"],
        "WorkingDir": "/home/app",
        "Labels": {"title": "app"},
    }
    assert blob(manifest["layers"][0]) == layer.tar.read_bytes()


def test_archive_is_written_again_only_when_it_differs_or_is_damaged(tmp_path: Path) -> None:
    layer = write_layer(make_tree(tmp_path / "a", 1_600_000_000), tmp_path / "a.tar", own_files)
    out = tmp_path / "image.tar"
    assert write_archive(out, ["app:dev"], [layer], CONFIG)
    whole = out.read_bytes()
    assert not write_archive(out, ["app:dev"], [layer], CONFIG)
    assert write_archive(out, ["app:other"], [layer], CONFIG)
    for damaged in (b"", whole[:700], whole[: len(whole) // 2], b"x" * 4096):
        out.write_bytes(damaged)
        assert write_archive(out, ["app:dev"], [layer], CONFIG), f"{len(damaged)} bytes"
        assert out.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# --- cache ---


def test_cached_entry_is_made_once_and_only_appears_complete(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ClusterError("the network went away")

    with images_tools.locked_cache(tmp_path, silent):
        with pytest.raises(ClusterError, match="network"):
            images_tools.cached(tmp_path, "entry", fail)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        entry = images_tools.cached(tmp_path, "entry", lambda folder: (folder / "file").touch())
        assert images_tools.cached(tmp_path, "entry", fail) == entry
    assert [path.name for path in entry.iterdir()] == ["file"]


def test_a_killed_builder_leaves_neither_lock_nor_half_an_entry(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from llmtrain_kind import images_tools\n"
        "def make(folder):\n"
        "    (folder / 'half').write_text('half'); print('started', flush=True); time.sleep(600)\n"
        "with images_tools.locked_cache(Path(sys.argv[1]), print):\n"
        "    images_tools.cached(Path(sys.argv[1]), 'entry', make)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kind")}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "started\n"
        os.kill(builder.pid, signal.SIGKILL)
    assert len(list(tmp_path.glob(".tmp-*"))) == 1
    with images_tools.locked_cache(tmp_path, silent):
        assert not list(tmp_path.glob(".tmp-*"))
        entry = images_tools.cached(tmp_path, "entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]


def test_prune_keeps_the_last_used_of_one_kind(tmp_path: Path) -> None:
    for age, name in enumerate(["code-1", "code-2", "code-3", "deps-1"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1_600_000_000 - age,) * 2)
    images_tools.cached(tmp_path, "code-3", lambda folder: None)
    images_tools.prune(tmp_path, "code", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code-1", "code-3", "deps-1"]


def test_files_key_sees_bytes_names_and_modes_but_no_bytecode(tmp_path: Path) -> None:
    source = tmp_path / "package" / "a.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    keys = [images_tools.files_key(tmp_path, [tmp_path / "package"])]
    (tmp_path / "package" / "a.pyc").write_bytes(b"bytecode")
    os.utime(source, (1_600_000_000,) * 2)
    assert images_tools.files_key(tmp_path, [tmp_path / "package"]) == keys[0]
    for change in (
        lambda: source.write_text("x = 2\n"),
        lambda: source.chmod(0o755),
        lambda: source.rename(source.with_name("b.py")),
    ):
        change()
        keys.append(images_tools.files_key(tmp_path, [tmp_path / "package"]))
    assert len(set(keys)) == len(keys)


# --- Debian's sources, and mistakes ---

MIRROR = "http://mirror.example/debian/"


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        pytest.param([f"Debian|{MIRROR}|bookworm|main"], [f"{MIRROR} bookworm main"], id="same-release"),
        pytest.param([f"Debian|{MIRROR}|trixie-updates|main"], [f"{MIRROR} bookworm-updates main"], id="newer-release"),
        pytest.param([f"Debian|{MIRROR}|bookworm|main"] * 2, [f"{MIRROR} bookworm main"], id="listed-twice"),
        pytest.param([f"Debian|{MIRROR}|bookworm-backports|main"], [], id="backports-are-left-out"),
        pytest.param([f"Debian|{MIRROR}|bookworm|non-free"], [], id="main-only"),
        pytest.param(["Ubuntu|http://mirror.example/ubuntu/|noble|main"], [], id="other-distribution"),
        pytest.param(["Node Source|http://mirror.example/node/|nodistro|main"], [], id="other-origin"),
    ],
)
def test_debian_sources_are_the_machines_own(targets: list[str], expected: list[str]) -> None:
    prefix = f"deb [signed-by={images_tools.DEBIAN_KEYRING}] "
    assert images_tools.source_lines("\n".join(targets), SPEC.suite) == [prefix + line for line in expected]


def test_unknown_image_and_wrong_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no image 'nobody'; there are: operator, trainer"):
        images._chosen(SPEC, "nobody")
    with pytest.raises(ImageError, match="give the root of the llmtrain repository"):
        load_spec(tmp_path)


def test_names_carry_dev_and_the_projects_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert images.image_names(SPEC, SPEC.images["operator"]) == [
        "localhost/llmtrain-operator:dev",
        f"localhost/llmtrain-operator:{version}",
    ]

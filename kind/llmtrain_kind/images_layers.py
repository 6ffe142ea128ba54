"""The three layers of an image: operating system, Python dependencies, our code; each cached by what it is made of."""

from __future__ import annotations

import json
import os
import platform
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from llmtrain_kind import images_wheel
from llmtrain_kind.images_chroot import compile_bytecode
from llmtrain_kind.images_oci import EPOCH, Layer, Normalise, keep_owner, own_files, write_layer
from llmtrain_kind.images_spec import BuildSpec, ImageError, ImageSpec, Progress
from llmtrain_kind.images_tools import (
    cached,
    debian_sources,
    files_key,
    key_of,
    need_mmdebstrap,
    resolver_target,
    run_isolated,
    uv_offline_first,
)

# Part of every key: raise it when the way a layer is made changes.
RECIPE = 1
# As in Debian's own container images: no manuals, translations or documentation, licences stay.
LEFT_OUT = ["path-exclude=/usr/share/man/*", "path-exclude=/usr/share/locale/*", "path-exclude=/usr/share/doc/*"]
LEFT_OUT += ["path-include=/usr/share/doc/*/copyright"]


def base_layer(spec: BuildSpec, progress: Progress) -> Layer:
    """Debian with apt.txt's packages, the user, and the folders that later layers and mounts need."""
    mount_paths = sorted(image.mount_path for image in spec.images.values() if image.mount_path)
    key = key_of(RECIPE, spec.suite, spec.apt, spec.uid, spec.home, spec.prefix, mount_paths, platform.machine())

    def fill(root: Path) -> None:
        need_mmdebstrap(progress)
        progress(f"base: Debian {spec.suite} by mmdebstrap")
        options = [f"--dpkgopt={option}" for option in LEFT_OUT]
        packages = f"--include={','.join(spec.apt)}"
        argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", packages, *options, spec.suite, str(root)]
        run_isolated([*argv, *debian_sources(spec.suite)], env=os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH)})
        _add_user(root, spec)
        for folder in (spec.prefix, *mount_paths):
            (root / folder.lstrip("/")).mkdir(parents=True)
        shutil.rmtree(root / "var" / "log")
        (root / "var" / "log").mkdir()

    return cached_layer(spec, f"base-{key}", fill, keep_owner)


def dependency_layer(spec: BuildSpec, image: ImageSpec, base: Layer, progress: Progress) -> Layer:
    """A virtual environment with the dependencies of `image`, less what is mounted from the host."""
    pins = pinned(spec, image, progress)[0]
    key = key_of(RECIPE, base.digest, spec.prefix, spec.python, image.mount_path, pins)

    def fill(root: Path) -> None:
        progress(f"{image.name}: {len(pins)} Python packages")
        site = root / spec.site_packages
        install_pins(spec, pins, site, progress)
        _virtual_environment(root / spec.prefix.lstrip("/"), spec)
        _console_scripts(root, spec)
        if image.mount_path:
            # A path file instead of PYTHONPATH: it also holds for processes started with a cleaned environment.
            (site / "llmtrain_mounted.pth").write_text(image.mount_path + "\n")
        compile_bytecode(base.root, root / spec.prefix.lstrip("/"), spec.prefix, strict=False)

    return cached_layer(spec, f"deps-{image.name}-{key}", fill, own_files)


def code_layer(spec: BuildSpec, image: ImageSpec, base: Layer, progress: Progress) -> Layer:
    """Our own distribution, cut down to the packages of `image`, with its console scripts."""
    wheel = _wheel(spec, progress)
    key = key_of(RECIPE, base.digest, spec.prefix, spec.python, wheel.parent.name, image.packages)

    def fill(root: Path) -> None:
        site = root / spec.site_packages
        half = images_wheel.split_wheel(spec.repo_root, image.name, wheel, root / "wheel")
        with zipfile.ZipFile(half) as archive:
            archive.extractall(site)
        shutil.rmtree(root / "wheel")
        _console_scripts(root, spec)
        compile_bytecode(base.root, root / spec.prefix.lstrip("/"), spec.prefix, strict=True)

    return cached_layer(spec, f"code-{image.name}-{key}", fill, own_files)


def pinned(spec: BuildSpec, image: ImageSpec, progress: Progress) -> tuple[list[str], list[str]]:
    """Exact requirements of `image`: those to install in the image, and those to mount from the host.

    The second list is what comes only with the mounted distributions: the two never share a package, so neither
    place can shadow the other.
    """
    wanted = images_wheel.requirements(spec.repo_root, image.name)
    key = key_of(RECIPE, wanted, spec.constraints.read_text(), image.mounted, resolver_target(spec))

    def resolve(folder: Path) -> None:
        (folder / "wanted.txt").write_text("\n".join(wanted) + "\n")
        (folder / "mounted.txt").write_text("\n".join(image.mounted) + "\n")
        command = ["pip", "compile", str(folder / "wanted.txt"), "-c", str(spec.constraints), *resolver_target(spec)]
        command += ["--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
        everything = uv_offline_first(spec, progress, command).split()
        inside = uv_offline_first(spec, progress, [*command, "--excludes", str(folder / "mounted.txt")]).split()
        outside = sorted(set(everything) - set(inside))
        (folder / "pins.json").write_text(json.dumps([inside, outside]))

    entry = cached(spec.cache, f"pins-{image.name}-{key}", resolve)
    inside, outside = json.loads((entry / "pins.json").read_text())
    return inside, outside


def install_pins(spec: BuildSpec, pins: list[str], target: Path, progress: Progress) -> None:
    """Unpacks exactly `pins` into `target`, hard-linked from uv's cache where the file system allows it."""
    command = ["pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", *resolver_target(spec)]
    command += ["--link-mode", "hardlink", "--target", str(target), *pins]
    uv_offline_first(spec, progress, command)
    (target / ".lock").unlink(missing_ok=True)


def cached_layer(spec: BuildSpec, name: str, fill: Callable[[Path], None], normalise: Normalise) -> Layer:
    """Return the layer of that name; made by `fill`, which gets an empty folder, where the cache has none."""

    def make(folder: Path) -> None:
        (folder / "root").mkdir()
        fill(folder / "root")
        layer = write_layer(folder / "root", folder / "layer.tar", normalise)
        (folder / "layer.json").write_text(json.dumps({"digest": layer.digest, "size": layer.size}))

    entry = cached(spec.cache, name, make)
    facts = json.loads((entry / "layer.json").read_text())
    return Layer(entry / "root", entry / "layer.tar", facts["digest"], facts["size"])


def _wheel(spec: BuildSpec, progress: Progress) -> Path:
    sources = [spec.repo_root / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    sources += [spec.repo_root / side for side in ("crds", "operator", "trainer")]
    key = files_key(spec.repo_root, sources)

    def build(folder: Path) -> None:
        progress("wheel of our own code")
        command = ["build", "--quiet", "--wheel", "--build-constraints", str(spec.constraints)]
        command += ["--out-dir", str(folder), str(spec.repo_root)]
        uv_offline_first(spec, progress, command)

    entry = cached(spec.cache, f"wheel-{key_of(RECIPE, key)}", build)
    wheels = list(entry.glob("*.whl"))
    if len(wheels) != 1:
        raise ImageError(f"expected one wheel in {entry}, found {len(wheels)}: remove that folder and build again")
    return wheels[0]


def _virtual_environment(prefix: Path, spec: BuildSpec) -> None:
    """What `python3 -m venv --without-pip` makes, without running the image's Python."""
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for name in ("python", "python3", f"python{spec.python}"):
        (prefix / "bin" / name).symlink_to(f"/usr/bin/python{spec.python}")


def _console_scripts(root: Path, spec: BuildSpec) -> None:
    """Scripts for every console entry point below `root`, run by the image's Python.

    uv writes them too, beside the packages and for the Python that runs this builder; those are dropped.
    """
    site, bin_dir = root / spec.site_packages, root / spec.prefix.lstrip("/") / "bin"
    shutil.rmtree(site / "bin", ignore_errors=True)
    bin_dir.mkdir(parents=True, exist_ok=True)
    for path in sorted(site.glob("*.dist-info/" + images_wheel.ENTRY_POINTS)):
        parser = images_wheel.entry_points(path.read_text())
        if not parser.has_section("console_scripts"):
            continue
        for name, value in parser.items("console_scripts"):
            module, _, attribute = value.partition("[")[0].strip().partition(":")
            first = attribute.split(".")[0]
            script = bin_dir / name
            script.write_text(
                f"#!{spec.prefix}/bin/python3\nimport sys\n\nfrom {module} import {first}\n\nsys.exit({attribute}())\n"
            )
            script.chmod(0o755)


def _add_user(root: Path, spec: BuildSpec) -> None:
    line_end = f"{spec.home}:/usr/sbin/nologin\n"
    with open(root / "etc" / "passwd", "a") as passwd:
        passwd.write(f"llmtrain:x:{spec.uid}:{spec.uid}:llmtrain:{line_end}")
    with open(root / "etc" / "group", "a") as group:
        group.write(f"llmtrain:x:{spec.uid}:\n")
    home = root / spec.home.lstrip("/")
    home.mkdir(parents=True)
    os.chown(home, spec.uid, spec.uid)

"""What is published: it builds, `twine` accepts it, it holds the package alone, and works where only it is installed."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import keras_auxref

ROOT = Path(__file__).parents[1]


def _run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that was made from it: what the sdist lacks, the wheel lacks."""
    pytest.importorskip("build", reason="pip install -e '.[package]'")
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "checkout"
    # Of a copy: setuptools writes into the folder that it builds, which another process may be building too.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "_build", "build", "runs", "*.egg-info", "__pycache__"))
    # In this environment, which has setuptools, so that nothing is downloaded.
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_twine_accepts_it(built):
    pytest.importorskip("twine", reason="pip install -e '.[package]'")
    assert _run(sys.executable, "-m", "twine", "check", "--strict", *built).count("PASSED") == 2


@pytest.mark.slow
def test_it_holds_the_package_and_nothing_else(built):
    sdist, wheel = built
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "keras_auxref").rglob("*.py")} | {"keras_auxref/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert files == sources
    assert metadata["Version"] == keras_auxref.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {text.split(",")[0] for text in metadata.get_all("Project-URL")} >= {"Source", "Issues", "Changelog"}
    versions = {text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") if "Python :: 3." in text}
    assert versions == {"3.11", "3.12", "3.13"}
    with tarfile.open(sdist) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert tops >= {"keras_auxref", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"}
    assert not tops & {"tests", "experiments", "examples", "benchmarks", "saved_models"}


@pytest.mark.slow
def test_it_works_where_only_it_is_installed(built, tmp_path):
    """An environment with the wheel alone. Its dependencies are those of this one, which would take gigabytes otherwise."""
    venv.create(tmp_path / "empty")
    python = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin") / "python"
    # A folder in a .pth file is searched for packages, but not for .pth files: an editable install of this one stays out.
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "KERAS_BACKEND")}
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[1], env=environment)
    said = _run(python, "-I", ROOT / "tests" / "smoke.py", cwd=tmp_path, env=environment)
    assert said.count("ok: ") == 9


def test_one_version_everywhere():
    version = keras_auxref.__version__
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    released = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[:1] == [version]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "file"),
    [("vendor.github-workflows", ".github/workflows/ci.yml"), ("vendor.citation-file-format", "CITATION.cff")],
)
def test_files_for_others_fit_their_schemas(schema, file):
    pytest.importorskip("check_jsonschema", reason="pip install -e '.[package]'")
    _run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, ROOT / file)

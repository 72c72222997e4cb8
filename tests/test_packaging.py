"""What is published: the source distribution holds all that its tests need, the package its suites and styles.

The conda recipe, the citation and the workflows say what pyproject.toml and the Makefile say.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import gemmery
import test_docs
from test_docs import ROOT, tracked

UNPUBLISHED = {".gitignore", "pyproject.toml", "PKG-INFO"}  # the last two are in every distribution
CONDA = {"matplotlib": "matplotlib-base", "nvidia-cuda-nvrtc": "cuda-nvrtc"}  # names that differ there
# What a workflow may run other than a make target: the package that .ci/run installs for its tests, too.
# Steps that only install what a target needs: PyTorch, or Debian's packages in a container.
INSTALL = r"\.venv/bin/python -m pip install --quiet torch==[\d.]+|apt-get update && apt-get install [a-z0-9 -]+"


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(name):
    """A YAML file of the repository."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout, so there is no list of tracked files")
def test_the_source_distribution_holds_every_tracked_file(project):
    included = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {Path(name).parts[0] for name in tracked("*")} - UNPUBLISHED <= included


def test_everything_that_the_source_distribution_names_is_in_it(project):
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("pattern", ["*.toml", "*.css", "*.html", "*.cu", "*.cuh", "*py.typed"])
def test_data_is_where_the_wheel_takes_it_from(pattern):
    assert [name for name in tracked(pattern) if re.match(r"packages/[\w-]+/src/", name)]


PACKAGES = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in (ROOT / "packages").glob("*/pyproject.toml")
}


def test_the_three_packages_are_one_version_of_what_a_checkout_installs(project):
    whole, (library, emulator, lab) = project["project"], (PACKAGES[name] for name in sorted(PACKAGES))
    assert {one["name"]: name for name, one in PACKAGES.items()} == {name: name for name in PACKAGES}
    assert {one["version"] for one in PACKAGES.values()} == {whole["version"], gemmery.__version__}
    for field in ("requires-python", "license", "license-files", "authors"):
        assert [one[field] for one in PACKAGES.values()] == [whole[field]] * 3
    licenses = {(ROOT / place / "LICENSE").read_text() for place in (".", *(f"packages/{name}" for name in PACKAGES))}
    assert len(licenses) == 1
    extras = whole["optional-dependencies"]
    own = f"=={whole['version']}"
    assert library["dependencies"] == whole["dependencies"]
    assert library["scripts"] == whole["scripts"]
    assert library["optional-dependencies"]["cuda"] == extras["cuda"]
    assert library["optional-dependencies"]["lab"] == [f"gemmery-lab{own}"]
    assert (emulator["dependencies"][0], lab["dependencies"][0]) == (f"gemmery{own}", f"gemmery-emulator{own}")
    assert {*emulator["dependencies"][1:], *lab["dependencies"][1:]} == set(extras["lab"])
    assert emulator["optional-dependencies"]["cuda"] == extras["cuda"][1:]
    assert emulator["entry-points"] == whole["entry-points"]


def test_a_checkout_installs_the_source_of_each_package(project):
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(wheel) == sorted(f"packages/{name}/src/{name.replace('-', '_')}" for name in PACKAGES)


@pytest.mark.process
def test_files_are_listed_inside_a_repository_that_ignores_them(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    unpacked = tmp_path / "dist" / "unpacked"
    (unpacked / "docs").mkdir(parents=True)
    (unpacked / "docs" / "page.md").touch()
    monkeypatch.setattr(test_docs, "ROOT", unpacked)
    assert tracked("*.md") == ["docs/page.md"]


def of_conda(requirements):
    """Requirements of pyproject.toml as a recipe writes them: "numpy >=2.0"."""
    pairs = (re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(.*)", requirement).groups() for requirement in requirements)
    return {f"{CONDA.get(name, name)} {version}" for name, version in pairs if name != "gemmery"}


def test_the_recipe_requires_what_the_package_does(project):
    recipe, package = read("recipe/recipe.yaml"), project["project"]
    needs = recipe["requirements"]
    least = recipe["context"]["python_min"]
    assert package["requires-python"] == f">={least}"
    assert set(needs["run"]) == of_conda(package["dependencies"]) | {"python >=${{ python_min }}"}
    extras = [one for extra in package["optional-dependencies"].values() for one in extra]
    assert set(needs["run_constraints"]) == of_conda(extras)
    built_with = of_conda(project["build-system"]["requires"])
    assert set(needs["host"]) == built_with | {"python ${{ python_min }}.*", "pip"}


def test_the_recipe_describes_this_package(project):
    recipe, package = read("recipe/recipe.yaml"), project["project"]
    (script,) = package["scripts"].items()
    assert recipe["context"] == {"name": package["name"], "version": package["version"], "python_min": "3.11"}
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]
    assert recipe["about"] == {
        "summary": package["description"],
        "license": package["license"],
        "license_file": package["license-files"][0],
    }
    assert recipe["tests"][0]["python"]["imports"] == [package["name"]]


def test_the_citation_names_this_package(project):
    citation, package = read("CITATION.cff"), project["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == package["authors"]
    assert (citation["title"], citation["version"]) == (package["name"], package["version"])
    assert (citation["abstract"], citation["license"]) == (package["description"], package["license"])
    assert citation["keywords"] == package["keywords"]


def test_classifiers_name_every_python_that_is_tested(project):
    classifiers = project["project"]["classifiers"]
    assert len(set(classifiers)) == len(classifiers)
    versions = {one.rpartition(" ")[2] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)}
    matrix = read(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert versions == set(matrix)


@pytest.mark.parametrize(
    ("name", "target"),
    [("arm", "test-arm"), ("check", "check"), ("test", "test-all"), ("wheels", "wheels"), ("site", "site-check")],
)
def test_a_workflow_runs_make_targets_and_nothing_else(name, target):
    """What is run elsewhere is what anyone can run here."""
    workflow = read(f".github/workflows/{name}.yml")
    assert workflow["name"] == name
    ((job, what),) = workflow["jobs"].items()
    assert job == name
    targets = {f"make {each}" for each in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    lines = [step["run"] for step in what["steps"] if "run" in step]
    assert f"make {target}" in lines
    assert [line for line in lines if line not in targets and not re.fullmatch(INSTALL, line)] == []
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in what["steps"] if "uses" in step)


def test_every_workflow_is_tested():
    names = {path.name for path in (ROOT / ".github" / "workflows").iterdir()}
    assert names == {"arm.yml", "check.yml", "test.yml", "wheels.yml", "site.yml"}

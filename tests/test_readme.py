"""Every code block of the documentation runs, and every command is the one that CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = ["docs/getting-started.md", "docs/index.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/guides/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}", marks=[pytest.mark.slow] if name in GUIDES else [])
    for name in ("README.md", "CONTRIBUTING.md", *GUIDES)
    for number, block in enumerate(re.findall(r"```python\n(.+?)```", (ROOT / name).read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = re.sub(r"epochs=\d+", "epochs=1, verbose=0", block)
    exec(compile(block, "block", "exec"), {"__name__": "block"})


def test_commands_are_single_lines_and_their_files_exist():
    readme = (ROOT / "README.md").read_text()
    commands = dict(re.findall(r"<!-- command: (\w+) -->\s*```bash\n(.+?)\n```", readme, re.S))
    assert set(commands) == {"main", "test"}
    for command in commands.values():
        assert "\n" not in command
        for script in re.findall(r"\S+\.py", command):
            assert (ROOT / script).exists()


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(p.relative_to(ROOT)) for f in ("docs", "saved_models") for p in ROOT.glob(f"{f}/**/*.md")),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_linked_file_and_heading_exists(name):
    text = re.sub(r"```.+?```", "", (ROOT / name).read_text(), flags=re.S)
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("http"):
            continue
        file = (ROOT / name).parent / target if target else ROOT / name
        assert file.exists(), target
        headings = (
            [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.+)$", file.read_text(), re.M)]
            if heading
            else []
        )
        assert not heading or heading in headings, f"{target}#{heading}"


def test_numbers_and_names_of_pages_are_those_of_the_code():
    from keras_auxref.flows import COUPLINGS, MIXINGS
    from keras_auxref.kernels import norms

    for page, names in (("guides/flows.md", MIXINGS), ("couplings.md", COUPLINGS)):
        rows = re.findall(r'^\| `"(\w+)"` \|', (ROOT / "docs" / page).read_text(), re.M)
        assert sorted(rows) == sorted(names), page
    text = (ROOT / "docs" / "mathematics.md").read_text()
    assert f"up to d = {norms.EXACT_UP_TO}" in text
    assert f"with p = {norms._POWER}" in text


def test_the_floors_of_the_contributing_page_are_those_of_the_tests():
    from tests.test_package import FLOORS

    table = (ROOT / "CONTRIBUTING.md").read_text().split("| floor | contents |")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert sorted(name for row in rows for name in row) == sorted(FLOORS)
    assert all(FLOORS[name] <= min(FLOORS[other] for other in rows[i + 1]) for i, row in enumerate(rows[:-1]) for name in row)

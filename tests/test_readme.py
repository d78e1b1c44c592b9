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

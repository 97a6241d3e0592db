"""Bill of materials (CycloneDX, JSON) of the locked requirements: `python requirements/sbom.py dist`, in `make dist`.

Names, versions and hashes are read from `run.txt` and `cuda.txt` by cyclonedx-py; licences are those of `licences.txt`.
The same locks give the same bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import licences
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

sys.path.insert(0, str(licences.ROOT))
from pipeline import __version__


def main(to: Path) -> Path:
    """Write the file into a folder; ends with an error if it is not valid, or a requirement has no licence."""
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "locked.txt"
        together.write_text("".join((licences.FOLDER / f"{name}.txt").read_text() for name in ("run", "cuda")))
        # It warns that it knows no direct requirements; they are added below.
        command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", str(together)]
        command += ["--output-reproducible", f"--pyproject={licences.ROOT / 'pyproject.toml'}", "--mc-type=application"]
        bill = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    bill["metadata"]["component"]["version"] = __version__
    known = licences.written()
    for component in bill["components"]:
        # It repeats the line of the file.
        del component["description"]
        name = licences.normal(component["name"])
        if name not in known:
            sys.exit(f"error: {name} is not in {licences.TABLE}; run `python requirements/licences.py`")
        component["licenses"] = [{"expression": known[name]}]
    project = tomllib.loads((licences.ROOT / "pyproject.toml").read_text())["project"]
    direct = {licences.normal(Requirement(each).name) for each in project["dependencies"]}
    root = bill["metadata"]["component"]["bom-ref"]
    (of_root,) = (each for each in bill["dependencies"] if each["ref"] == root)
    of_root["dependsOn"] = sorted(each["bom-ref"] for each in bill["components"] if each["name"] in direct)
    text = json.dumps(bill, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if problem := JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text):
        sys.exit(f"error: not a valid bill of materials: {problem}")
    output = to / f"{bill['metadata']['component']['name']}-{__version__}.cdx.json"
    output.write_text(text)
    return output


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))

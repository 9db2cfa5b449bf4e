"""Puts configs/ into built packages as nsa_jax/configs; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """An installed package has its configs by name: nsa-jax train quickstart."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "nsa_jax" / "configs"
            target.mkdir(parents=True, exist_ok=True)
            for path in Path("configs").glob("*.py"):
                self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithConfigs})

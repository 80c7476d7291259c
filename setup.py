"""Packaging: everything that changes is in settings.ini."""

import configparser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = configparser.ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
lib = cfg["lib_name"]


def requirements(key: str) -> list[str]:
    return cfg.get(key, "").split()


extras = {name: requirements(f"{name}_requirements") for name in ("deepspeed", "trackers", "qlora", "verify", "math", "gguf", "games", "ray", "serve", "constrain", "pii", "learn", "docs", "browser", "dev")}
extras["test"] = [p for name in ("dev", "deepspeed", "verify", "math", "gguf", "serve", "constrain") for p in extras[name]] + ["tensorboard", "openai", "httpx"]

setup(
    name=lib,
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    keywords=cfg["keywords"],
    license="Apache-2.0",
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={lib: ["py.typed", "*.pyi", "*.yaml", "*/*.yaml", "*/*.md", "widgets/*.js", "widgets/*.css", "widgets/*.html", "widgets/*.txt", "serve/page.css", "serve/page.html", "serve/page.js", "recipes/accelerate/*.yaml", "cli/*.json", "data/chat/*.jinja", "learn/*.safetensors", "learn/models/*.safetensors"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=requirements("requirements"),
    extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)

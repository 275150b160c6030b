"""From the hub to a folder laid out as the hub: resumable, checked against the hub's own checksums, with a manifest."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmstack.checkpoint.files import failing_in_one_line, write_atomically
from llmstack.errors import UserError
from llmstack.hub import HubSet

MANIFEST = "manifest.json"
"""In each repository's folder: its commit, and size and SHA-256 of each file that is there, whole and checked."""


def fetch(hub_set: HubSet, root: Path, num_files: int | None, report: Callable[[str], None]) -> int:
    """Bring the files of a set into ``root``; what is there and whole stays, what is there in part is continued.

    Args:
        hub_set: what to fetch.
        root: folder laid out as the hub.
        num_files: of each split only the first so many files; None: all.
        report: told of each file.

    Returns:
        Bytes that the set has in the folder.

    Raises:
        UserError: the hub cannot be reached, does not have the set or refuses it, or a file is not what it says.
    """
    import httpx2  # what the hub's library speaks HTTP with
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    folder = root / hub_set.repo
    manifest = _Manifest(folder, hub_set)
    try:
        api = HfApi()
        commit = manifest.commit or api.repo_info(hub_set.repo, repo_type=hub_set.kind).sha
        assert commit is not None
        tree = api.list_repo_tree(hub_set.repo, recursive=True, revision=commit, repo_type=hub_set.kind)
        wanted = list(_wanted(hub_set, [entry for entry in tree if hasattr(entry, "size")], num_files))
        if not wanted:
            raise UserError(f"{hub_set.repo} has no files {' or '.join(hub_set.files.values())} on the hub any more")
        total = 0
        for number, entry in enumerate(wanted, start=1):
            total += entry.size
            if manifest.has(entry.path, entry.size):
                continue
            report(f"fetch: {hub_set.repo} {number}/{len(wanted)} {entry.path} ({entry.size / 1e6:,.1f} MB)")
            with failing_in_one_line(folder):
                path = Path(
                    hf_hub_download(hub_set.repo, entry.path, repo_type=hub_set.kind, revision=commit, local_dir=folder)
                )
                manifest.add(entry.path, commit, _checked(path, entry))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise UserError(_why(hub_set, error)) from error
    except OSError as error:
        raise UserError(f"{hub_set.repo}: the hub cannot be reached ({error})") from error
    return total


def _wanted(hub_set: HubSet, entries: list[Any], num_files: int | None) -> Iterator[Any]:
    """Of each split the (first) files, and the card, in which the hub's own loaders read what the splits are."""
    by_path = {entry.path: entry for entry in sorted(entries, key=lambda entry: entry.path)}
    if "README.md" in by_path and hub_set.kind == "dataset":
        yield by_path["README.md"]
    for patterns in hub_set.files.values():
        matching = [path for path in by_path if any(fnmatch.fnmatch(path, one) for one in patterns.split("|"))]
        yield from (by_path[path] for path in matching[:num_files])


def _checked(path: Path, entry: Any) -> str:
    """SHA-256 of a file that is what the hub says: by that, or, for a small file, by git's hash of its content."""
    sha256, git = hashlib.sha256(), hashlib.sha1(f"blob {entry.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            git.update(block)
    found, expected = (sha256, entry.lfs.sha256) if entry.lfs else (git, entry.blob_id)
    if found.hexdigest() != expected:
        path.unlink()
        raise UserError(f"{path}: what came is not what the hub has (checksum); start again to fetch it anew")
    return sha256.hexdigest()


def _why(hub_set: HubSet, error: Exception) -> str:
    """The hub's refusal in one line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"{hub_set.repo}: the hub refuses it ({status}); {hub_set.note or 'set HF_TOKEN'}"
    if status == 404:
        return f"{hub_set.repo}: the hub does not have it (404)"
    return f"{hub_set.repo}: the hub cannot be reached ({str(error).splitlines()[0]})"


class _Manifest:
    """What a repository's folder holds."""

    def __init__(self, folder: Path, hub_set: HubSet) -> None:
        self._folder, self._repo = folder, hub_set.repo
        path = folder / MANIFEST
        self._content: dict[str, Any] = {"repo": hub_set.repo, "commit": None, "files": {}}
        if path.is_file():
            try:
                self._content = json.loads(path.read_text())
            except ValueError as error:
                raise UserError(f"{path}: damaged ({error}); delete it to check all files anew") from error

    @property
    def commit(self) -> str | None:
        """Of the hub's repository; all files are of one."""
        return self._content["commit"]

    def has(self, name: str, size: int) -> bool:
        path = self._folder / name
        return name in self._content["files"] and path.is_file() and path.stat().st_size == size

    def add(self, name: str, commit: str, sha256: str) -> None:
        """A file is there, and what it should be."""
        self._content["commit"] = commit
        self._content["files"][name] = {"size": (self._folder / name).stat().st_size, "sha256": sha256}
        write_atomically(self._folder / MANIFEST, json.dumps(self._content, indent=1) + "\n")

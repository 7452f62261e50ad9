"""The steps from a reference to a model in the cache: listing, choice, confirmation, download, record."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from genai.common.interrupts import InterruptsDeferred
from genai.common.progress import Task, task

from ..common.foreign_models import downloaded
from ..common.locks import locked
from ..common.memory_limits import format_bytes
from ..common.reading import file_text, json_object
from ..errors import DownloadError, GenaiError, ModelFolderError, UnreachableError, did_you_mean
from . import store
from .choosing import INDEX, FileChoice, choose
from .client import AGAIN, Client, Notice
from .download import Progress, fetch_file, missing_bytes, remove_strangers
from .known import known_models
from .listing import Listing, RemoteFile, read_listing
from .references import Reference, offline
from .shared_cache import cached_listing, snapshot_of
from .store import PulledModel

# Number of bytes that must stay free after a download.
_MARGIN = 64 << 20
# Files that describe a model, its tokenizer and the files of its weights. They are downloaded before the weights.
_DESCRIPTIONS = re.compile(r".*\.(?:json|jinja|txt|model(?:\.v\w+)?|tiktoken)")


@dataclass(frozen=True)
class PullPlan:
    """The files that a pull will download, and the folder for them.

    Attributes:
        listing: the repository.
        choice: the files of the model.
        folder: the folder that collects the files.
        total_bytes: size of all files.
        missing_bytes: part of `total_bytes` that earlier attempts have not downloaded.
    """

    listing: Listing
    choice: FileChoice
    folder: Path
    total_bytes: int
    missing_bytes: int

    @property
    def name(self) -> str:
        """The name of the model in the cache."""
        return self.listing.reference.name


@dataclass(frozen=True)
class PullHooks:
    """Callbacks of a pull.

    Attributes:
        ask: called with the plan before the download; if it returns False, the download is cancelled.
        check: called with the kind and path of the model when all files except its weights are present; raises an error
            if the model cannot run.
        watch: called with the plan when the download starts.
        waiting: called with the folder while another process pulls the same model.
        notice: called with the cause of a wait.
    """

    ask: Callable[[PullPlan], bool] = lambda plan: True
    check: Callable[[str, Path], None] = lambda kind, folder: None
    watch: Callable[[PullPlan], None] = lambda plan: None
    waiting: Callable[[Path], None] = lambda folder: None
    notice: Notice = lambda text: None


def plan_pull(reference: Reference, *, precision: str | None = None, notice: Notice = lambda text: None) -> PullPlan:
    """List the repository, choose the files, and compute the missing bytes.

    Raises:
        AccessError, DownloadError: if the repository cannot be listed, or contains no model that can run here.
    """
    listing = _listing(reference, notice)
    choice = _chosen(listing, precision)
    folder = store.partial_folder(reference.name) / store.inner_name(reference.name)
    total = sum(file.size for file in choice.files)
    return PullPlan(listing, choice, folder, total, missing_bytes(choice.files, folder, reference.repo))


def _listing(reference: Reference, notice: Notice) -> Listing:
    """Return the hub's listing, or the listing of a copy in Hugging Face's cache if the hub cannot be reached."""
    if offline():
        if (copy := cached_listing(reference)) is not None:
            return copy
        download = downloaded(reference.repo) if reference.repo else None
        raise _with_nearest(
            reference,
            DownloadError(
                f"{reference.name}: the model is not in the cache",
                "HF_HUB_OFFLINE disables network access",
                f"unset HF_HUB_OFFLINE, and run `genai pull {quote(reference.name)}` once"
                + (f"; or pass the folder that Hugging Face's library downloaded: {download}" if download else ""),
            ),
        )
    try:
        return read_listing(reference, notice)
    except UnreachableError as error:
        if (copy := cached_listing(reference)) is not None:
            notice("the hub cannot be reached, so the copy in Hugging Face's cache is used")
            return copy
        server = "the hub" if reference.repo else "its server"
        what = f"{reference.name} is not in the cache, and {server} cannot be reached"
        raise _with_nearest(reference, DownloadError(what, error.why, error.fix)) from error
    except DownloadError as error:
        raise _with_nearest(reference, error) from error


def _chosen(listing: Listing, precision: str | None) -> FileChoice:
    """Choose the files of the model. A listing of Hugging Face's cache must have all of them."""
    snapshot = snapshot_of(listing.reference)
    is_copy = snapshot is not None and any(file.url.startswith("file:") for file in listing.files)
    try:
        choice = choose(listing, precision=precision)
        if snapshot is not None and is_copy:
            _check_index(choice, snapshot)
    except GenaiError as error:
        if not is_copy:
            raise
        raise DownloadError(
            f"{listing.reference.name}: the copy in Hugging Face's cache is incomplete, and the hub cannot be reached",
            error.what,
            f"connect to the network, unset HF_HUB_OFFLINE, and run `genai pull {quote(listing.reference.name)}`",
        ) from error
    return choice


def _with_nearest(reference: Reference, error: DownloadError) -> DownloadError:
    """Add the most similar name in the cache, or in the table of short names, to the error for an unknown name."""
    if near := did_you_mean(reference.name, [model.name for model in store.models()]):
        return type(error)(error.what, error.why, f"{error.fix}; in the cache: {near}")
    table = [model.repository for model in known_models().values()]
    near = "" if offline() or reference.repo in table else did_you_mean(reference.name, table)
    return type(error)(error.what, error.why, f"{error.fix}; {near}") if near else error


def pull_model(reference: Reference, hooks: PullHooks, *, precision: str | None = None) -> PulledModel:
    """Return the cached model of a reference; first download the model if it is not in the cache.

    After an interruption, the next call resumes the download. The model appears only when all of its files are complete
    and their checksums are right. If two processes pull the same model, one downloads and the other waits.

    Raises:
        AccessError, DownloadError: if the disk has too little space, or as for `plan_pull` and `fetch_file`.
        ModelFolderError: if the folder cannot be created, or `hooks.ask` declined.
        Exception: any error of `hooks.check`.
    """
    if (pulled := store.find(reference.name)) is not None:
        return pulled
    with task(f"Looking up {reference.name}"):
        plan = plan_pull(reference, precision=precision, notice=hooks.notice)
    _require_room(plan)
    if not hooks.ask(plan):
        raise ModelFolderError(
            f"{plan.name} was not pulled",
            "you declined the download",
            f"to pull the model without confirmation, run `genai pull {quote(plan.name)}`",
        )
    partial = store.partial_folder(plan.name)
    store.remove_leftovers()
    with _held(partial, hooks):
        if (pulled := store.find(reference.name)) is not None:  # another process has pulled it meanwhile
            shutil.rmtree(partial, ignore_errors=True)
            return pulled
        hooks.watch(plan)
        try:
            with _pulling(plan) as receiving:
                return _fetch(plan, partial, hooks, receiving.add)
        except GenaiError as error:
            if not store.bytes_below(partial):  # a refused download leaves nothing to resume
                shutil.rmtree(partial, ignore_errors=True)
            elif error.fix.endswith(AGAIN):
                error.fix += " to resume the download"
                error.args = (error.what, error.why, error.fix)
            raise


def _pulling(plan: PullPlan) -> Task:
    """Return the task that counts the bytes received."""
    unit, name = (1e9, "GB") if plan.missing_bytes >= 1e9 else (1e6, "MB")
    return task("Pulling", plan.missing_bytes, amount=lambda count: f"{count / unit:.2f} {name}")


def _fetch(plan: PullPlan, partial: Path, hooks: PullHooks, report: Progress) -> PulledModel:
    listing, choice, folder = plan.listing, plan.choice, plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_strangers(choice.files, folder)
    client = Client(listing.page if listing.commit else "", hooks.notice)
    order = sorted(choice.files, key=lambda file: (not _is_description(file), file.path))
    descriptions = [file for file in order if _is_description(file)]
    pulled = {file.path: fetch_file(client, listing, file, folder, report) for file in descriptions}
    unnamed = _check(plan, hooks)
    for file in order[len(descriptions) :]:
        if file.path in unnamed:
            report(file.size)
        else:
            pulled[file.path] = fetch_file(client, listing, file, folder, report)
    final = store.hub_folder() / partial.name
    model = PulledModel(
        plan.name, choice.kind, choice.root, listing.page, listing.commit, listing.license, store.now(),
        tuple(pulled[file.path] for file in choice.files if file.path in pulled), final,
    )  # fmt: skip
    try:
        model.write(partial)
    except OSError as error:
        raise DownloadError(
            f"{partial / store.RECORD} cannot be written", str(error),
            "free some space, or check the folder's permissions, and run the command again to resume the download",
        ) from error  # fmt: skip
    try:
        with InterruptsDeferred():
            partial.rename(final)
    except OSError as error:
        is_folder = final.is_dir() and not final.is_symlink()
        fix = f"remove that folder with `genai rm {final.name}`" if is_folder else f"move {final} to another folder"
        raise ModelFolderError(
            f"{final} cannot be created", str(error), f"{fix}, and run the command again to resume the download"
        ) from error
    return model


def _is_description(file: RemoteFile) -> bool:
    return _DESCRIPTIONS.fullmatch(file.path) is not None


def _check(plan: PullPlan, hooks: PullHooks) -> set[str]:
    """Delete the files of a model that cannot run, and raise the reason.

    Returns the weight files that the model does not need, because its index does not name them.
    """
    choice, folder = plan.choice, plan.folder
    try:
        unnamed = _check_index(choice, folder)
        hooks.check(choice.kind, folder / choice.root)
    except GenaiError as error:
        shutil.rmtree(folder, ignore_errors=True)
        others = f"to download it for other programs, run `hf download {plan.listing.reference.repo}`"
        raise type(error)(error.what, error.why, f"{error.fix}; {others}") from error
    return unnamed


def _check_index(choice: FileChoice, folder: Path) -> set[str]:
    """Check that the repository has every shard in the index, and return the files that are not in the index."""
    present = {file.path for file in choice.files}
    if INDEX not in present:
        return set()
    index = json_object(file_text(folder / INDEX, DownloadError, DownloadError) or "", INDEX, DownloadError)
    weight_map = index.get("weight_map")
    named = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not named:
        raise DownloadError(
            f"{INDEX} has no weight_map",
            "a weight_map is required to find the file of each tensor",
            "look on the model's page for another revision (`genai pull ORG/NAME@REVISION`) or a copy of the model",
        )
    if missing := sorted(named - present):
        raise DownloadError(
            f"{INDEX} lists {len(missing)} files that are not in the repository: {', '.join(missing[:3])}",
            "the model is incomplete without them",
            "look on the model's page for another revision (`genai pull ORG/NAME@REVISION`) or a copy of the model",
        )
    return {path for path in present - named if path.endswith(".safetensors")}


def _require_room(plan: PullPlan) -> None:
    parent = next(folder for folder in (plan.folder, *plan.folder.parents) if folder.is_dir())
    free, needed = shutil.disk_usage(parent).free, plan.missing_bytes + _MARGIN
    if free < needed:
        raise DownloadError(
            f"{plan.name}: {format_bytes(plan.missing_bytes)} must be downloaded, but only {format_bytes(free)} is "
            f"free in {parent}",
            f"{format_bytes(_MARGIN)} must stay free, because the download fails if the disk becomes full",
            "free some space (`genai list` shows cached models), or set GENAI_CACHE_DIR to a folder on another disk",
        )


@contextmanager
def _held(partial: Path, hooks: PullHooks) -> Iterator[None]:
    """Hold the lock on a partial folder. If the previous holder has renamed the folder, start again."""
    while True:
        try:
            partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ModelFolderError(
                f"{partial} cannot be created", str(error), "set GENAI_CACHE_DIR to a writable folder"
            ) from error
        with _locked(partial, hooks) as inode:
            if inode == _inode(partial):
                yield
                return


@contextmanager
def _locked(partial: Path, hooks: PullHooks) -> Iterator[int | None]:
    before = _inode(partial)
    with locked(partial, wait=False) as free:
        if free is not False:
            yield before
            return
    hooks.waiting(partial)
    with locked(partial):
        yield before


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None

"""From a reference to a model in the cache: listing, choice, question, download, record."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from genai.common.interrupts import InterruptsDeferred

from ..common.foreign_models import downloaded
from ..common.locks import locked
from ..common.reading import file_text, json_object
from ..errors import DownloadError, GenaiError, ModelFolderError, did_you_mean
from . import store
from .choosing import INDEX, FileChoice, choose
from .client import Client, Notice
from .download import Progress, fetch_file, missing_bytes, remove_strangers
from .listing import Listing, RemoteFile, read_listing
from .references import Reference, offline
from .store import PulledModel

# Kept free beside what is downloaded.
_MARGIN = 64 << 20
# Files that say what a model is, how it reads text, and where its weights are. They come before these.
_DESCRIPTIONS = re.compile(r".*\.(?:json|jinja|txt|model(?:\.v\w+)?|tiktoken)")


@dataclass(frozen=True)
class PullPlan:
    """What a pull will fetch, and where to.

    Attributes:
        missing_bytes: of `total_bytes`, those that are not here from an earlier try.
    """

    listing: Listing
    choice: FileChoice
    folder: Path
    total_bytes: int
    missing_bytes: int

    @property
    def name(self) -> str:
        """What the model will be called."""
        return self.listing.reference.name


@dataclass(frozen=True)
class PullHooks:
    """What is asked and told on the way.

    Attributes:
        ask: given the plan before anything comes; False ends it.
        check: given the kind and place of the model, when all but its weights is there; raises if it cannot be run.
        watch: given the plan when the download begins; what it returns is told the bytes that come.
        waiting: told the folder, while another process pulls the same model.
        notice: told in words what is being waited for.
    """

    ask: Callable[[PullPlan], bool] = lambda plan: True
    check: Callable[[str, Path], None] = lambda kind, folder: None
    watch: Callable[[PullPlan], Progress] = lambda plan: lambda count: None
    waiting: Callable[[Path], None] = lambda folder: None
    notice: Notice = lambda text: None


def plan_pull(reference: Reference, *, quantised: bool = False, notice: Notice = lambda text: None) -> PullPlan:
    """Ask what there is, choose, and see what is missing.

    Raises:
        AccessError, DownloadError: it cannot be seen, or there is nothing in it that runs here.
    """
    if offline():
        download = downloaded(reference.repo) if reference.repo else None
        raise _with_nearest(
            reference,
            DownloadError(
                f"{reference.name}: is not in the cache",
                "HF_HUB_OFFLINE forbids the network",
                f"unset it, and run `genai pull {quote(reference.name)}` once"
                + (f"; or use what Hugging Face's library downloaded: {download}" if download else ""),
            ),
        )
    try:
        listing = read_listing(reference, notice)
    except DownloadError as error:
        raise _with_nearest(reference, error) from error
    choice = choose(listing, quantised=quantised)
    folder = store.partial_folder(reference.name) / store.inner_name(reference.name)
    total = sum(file.size for file in choice.files)
    return PullPlan(listing, choice, folder, total, missing_bytes(choice.files, folder))


def _with_nearest(reference: Reference, error: DownloadError) -> DownloadError:
    """The error of a name that leads nowhere, with the name in the cache that may have been meant."""
    near = did_you_mean(reference.name, [model.name for model in store.models()])
    return type(error)(error.what, error.why, f"{error.fix}; of those in the cache, {near}") if near else error


def pull_model(reference: Reference, hooks: PullHooks, *, quantised: bool = False) -> PulledModel:
    """The model of a reference in the cache; fetched if it is not there.

    What has come stays when this is interrupted, and the next call goes on behind it. The model appears when all its
    files are there and their checksums are right. Of two processes one fetches, and the other waits.

    Raises:
        AccessError, DownloadError: see `plan_pull`, `fetch_file`. ModelFolderError: there is no room, or the answer
        was no. Whatever `hooks.check` raises.
    """
    if (pulled := store.find(reference.name)) is not None:
        return pulled
    plan = plan_pull(reference, quantised=quantised, notice=hooks.notice)
    _require_room(plan)
    if not hooks.ask(plan):
        raise ModelFolderError(
            f"{plan.name} was not pulled",
            "the answer was no",
            f"`genai pull {quote(plan.name)}` pulls it without asking",
        )
    partial = store.partial_folder(plan.name)
    store.remove_leftovers()
    with _held(partial, hooks):
        if (pulled := store.find(reference.name)) is not None:  # another process was faster
            shutil.rmtree(partial, ignore_errors=True)
            return pulled
        try:
            return _fetch(plan, partial, hooks)
        except GenaiError:
            if not store.bytes_below(partial):  # what was refused leaves nothing to go on with
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _fetch(plan: PullPlan, partial: Path, hooks: PullHooks) -> PulledModel:
    listing, choice, folder = plan.listing, plan.choice, plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_strangers(choice.files, folder)
    client, report = Client(listing.page if listing.commit else "", hooks.notice), hooks.watch(plan)
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
            f"cannot write {partial / store.RECORD}", str(error),
            "free some space, or check the folder's permissions, and run the command again: what has come is kept",
        ) from error  # fmt: skip
    try:
        with InterruptsDeferred():
            partial.rename(final)
    except OSError as error:
        is_folder = final.is_dir() and not final.is_symlink()
        fix = f"`genai rm {final.name}` removes what is in its place" if is_folder else f"move {final} away"
        raise ModelFolderError(f"cannot make {final}", str(error), f"{fix}; what has come is kept") from error
    return model


def _is_description(file: RemoteFile) -> bool:
    return _DESCRIPTIONS.fullmatch(file.path) is not None


def _check(plan: PullPlan, hooks: PullHooks) -> set[str]:
    """A model that cannot be run is not fetched, and what has come of it goes. Returns the weights that it does not
    need: those that its index does not name."""
    choice, folder = plan.choice, plan.folder
    try:
        unnamed = _check_index(choice, folder)
        hooks.check(choice.kind, folder / choice.root)
    except GenaiError as error:
        shutil.rmtree(folder, ignore_errors=True)
        others = f"`hf download {plan.listing.reference.repo}` fetches it for other programs"
        raise type(error)(error.what, error.why, f"{error.fix}; {others}") from error
    return unnamed


def _check_index(choice: FileChoice, folder: Path) -> set[str]:
    """The shards that an index names are all there, or the rest would come for nothing. Returns those it does not."""
    present = {file.path for file in choice.files}
    if INDEX not in present:
        return set()
    index = json_object(file_text(folder / INDEX, DownloadError, DownloadError) or "", INDEX, DownloadError)
    weight_map = index.get("weight_map")
    named = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not named:
        raise DownloadError(
            f"{INDEX} has no weight_map",
            "it says which file holds which tensor",
            "look at its page for another revision (`genai pull ORG/NAME@REVISION`), or for a copy of it",
        )
    if missing := sorted(named - present):
        raise DownloadError(
            f"{INDEX} names {len(missing)} files that the repository has not: {', '.join(missing[:3])}",
            "without them the model is not whole",
            "look at its page for another revision (`genai pull ORG/NAME@REVISION`), or for a copy of it",
        )
    return {path for path in present - named if path.endswith(".safetensors")}


def _require_room(plan: PullPlan) -> None:
    parent = next(folder for folder in (plan.folder, *plan.folder.parents) if folder.is_dir())
    free, needed = shutil.disk_usage(parent).free, plan.missing_bytes + _MARGIN
    if free < needed:
        raise DownloadError(
            f"{plan.name}: {plan.missing_bytes / 1e9:.2f} GB have yet to come, {free / 1e9:.2f} GB are free in "
            f"{parent}",
            f"a download that fills the disk fails at its end, and {_MARGIN / 1e9:.2f} GB are left free",
            "free some space (`genai list` shows what is here), or set GENAI_CACHE_DIR to another disk",
        )


@contextmanager
def _held(partial: Path, hooks: PullHooks) -> Iterator[None]:
    """The lock on the folder where a model gathers; whoever had it before may have renamed it away meanwhile."""
    while True:
        try:
            partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ModelFolderError(
                f"cannot make {partial}", str(error), "set GENAI_CACHE_DIR to a folder that can be written"
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

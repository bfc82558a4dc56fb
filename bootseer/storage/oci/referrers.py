"""Referrers of a manifest, by the referrers API or its fallback tag; from them also the tree of an image.

In: a name. Out: a bounded number of descriptors of one type. In the calling thread, like oci_client's methods.
"""

from __future__ import annotations

from urllib.parse import urlencode

from bootseer.errors import IntegrityError, NotFound
from bootseer.storage.http.client import is_same_server, resolve_location
from bootseer.storage.oci.client import RegistryClient
from bootseer.storage.oci.headers import next_page
from bootseer.storage.oci.http import RegistryCall
from bootseer.storage.oci.manifest import (
    INDEX,
    MAX_MANIFEST_BYTES,
    TREE,
    Descriptor,
    Document,
    TreeFiles,
    is_tree,
    newest,
    parse_index,
    parse_manifest,
    to_document,
    tree_files,
)
from bootseer.storage.oci.options import RegistryPlace
from bootseer.storage.oci.reference import Reference, referrers_tag, tree_tag

MAX_PAGES = 16
MAX_REFERRERS = 4096
MAX_CANDIDATES = 8  # of them, to find one that is a trusted tree
_NO_API = (400, 404, 405, 501)


def read_tree(client: RegistryClient, reference: Reference, call: RegistryCall) -> TreeFiles:
    """Read the tree of a name: its own, or the last one that was pushed for the image of that name.

    The last one has a tag. Without the tag it is the newest referrer of the image, by its annotation.
    Raises: NotFound when the tree or the name does not exist; IntegrityError, StorageError.
    """
    where = str(reference)
    document = client.read_document(reference, call)
    if is_tree(document, where):
        return tree_files(document, where)
    tagged = _read_tagged(client, reference, document.digest, call)
    if tagged is not None:
        return tagged
    failure: IntegrityError | NotFound = NotFound(
        f"{where}: is not a tree, and none refers to it: `bootseer image build` makes one of an image"
    )
    for found in _candidates(client, reference, document.digest, call):
        try:
            return tree_files(client.read_document(reference.at(found.digest), call), where)
        except (IntegrityError, NotFound) as error:
            failure = error  # anyone with push access may have made it
    try:
        raise failure
    finally:
        del failure  # it holds this frame


def other_trees(client: RegistryClient, reference: Reference, besides: str, call: RegistryCall) -> list[str]:
    """Return the manifest digests of other trees for the image of that name, newest first; a few."""
    document = client.read_document(reference, call)
    if is_tree(document, str(reference)):
        return []
    found = _candidates(client, reference, document.digest, call)
    return [each.digest for each in found if each.digest != besides]


def _candidates(client: RegistryClient, reference: Reference, digest: str, call: RegistryCall) -> list[Descriptor]:
    left = find_referrers(client, reference, digest, TREE, call)
    chosen: list[Descriptor] = []
    while len(chosen) < MAX_CANDIDATES and (found := newest(left)) is not None:
        chosen.append(found)
        left = [each for each in left if each.digest != found.digest]
    return chosen


def _read_tagged(
    client: RegistryClient, reference: Reference, digest: str, call: RegistryCall
) -> TreeFiles | None:
    """Return None if the tag is missing or names something else. Queries the registry first, as for referrers."""
    tag = tree_tag(digest)

    def read(place: RegistryPlace) -> Document | None:
        try:
            return client.read_at(place, tag, call)
        except NotFound:
            return None

    where = f"{reference.name}:{tag}"
    try:
        document = client.from_any(reference, read, is_origin_first=True)
        if document is None or not is_tree(document, where):
            return None
        subject = parse_manifest(document, where).subject
        return tree_files(document, where) if subject is not None and subject.digest == digest else None
    except IntegrityError:
        return None


def find_referrers(
    client: RegistryClient, reference: Reference, digest: str, artifact_type: str, call: RegistryCall
) -> list[Descriptor]:
    """Return the referrers of a manifest of the repository that have this type.

    Queries the registry first: mirrors often have neither the API nor the tag.
    """
    found = client.from_any(
        reference, lambda place: _of_place(client, place, digest, artifact_type, call), is_origin_first=True
    )
    return [each for each in found if each.artifact_type == artifact_type]


def _of_place(
    client: RegistryClient, place: RegistryPlace, digest: str, artifact_type: str, call: RegistryCall
) -> list[Descriptor]:
    if place.host not in client.without_referrers:
        found = _ask_api(client, place, digest, artifact_type, call)
        if found is not None:
            return found
        client.without_referrers.add(place.host)
    tag = referrers_tag(digest)
    try:
        document = client.read_at(place, tag, call)
    except NotFound:
        return []
    return parse_index(document, f"{place.name}:{tag}").manifests[:MAX_REFERRERS]


def _ask_api(
    client: RegistryClient, place: RegistryPlace, digest: str, artifact_type: str, call: RegistryCall
) -> list[Descriptor] | None:
    """Return None when the registry lacks the API."""
    found: list[Descriptor] = []
    where = f"{place.name}: referrers of {digest}"
    url = f"{client.base_url(place, call)}/referrers/{digest}?{urlencode({'artifactType': artifact_type})}"
    for page in range(MAX_PAGES):
        exchange = client.get(place, url, {"Accept": INDEX}, call)
        content_type = exchange.headers.get("Content-Type", "").partition(";")[0].strip()
        if page == 0 and (exchange.status in _NO_API or (exchange.status == 200 and content_type != INDEX)):
            exchange.drop()  # an HTML page
            return None
        if exchange.status != 200:
            raise client.refusal(exchange, place, where, call)
        data = client.http.read(exchange, MAX_MANIFEST_BYTES, call)
        found += parse_index(to_document(data, content_type, where), where).manifests
        link = next_page(", ".join(exchange.headers.get_all("Link") or []))
        if not link or len(found) >= MAX_REFERRERS:
            break
        following = resolve_location(url, link, exchange.shown)
        if not is_same_server(url, following):
            raise IntegrityError(f"{where}: the next page is on another server")
        url = following
    return found[:MAX_REFERRERS]

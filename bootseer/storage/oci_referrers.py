"""What refers to a manifest, by the referrers API or the tag that stands in for it; so also the tree of an image.

In: a name. Out: descriptors, bounded in number, of one type. In the calling thread, as oci_client's methods.
"""

from __future__ import annotations

from urllib.parse import urlencode

from bootseer.errors import IntegrityError, NotFound
from bootseer.storage.oci_client import RegistryClient
from bootseer.storage.oci_headers import next_page
from bootseer.storage.oci_http import Call, is_same_server, resolve_location
from bootseer.storage.oci_manifest import (
    INDEX,
    MOST_MANIFEST_BYTES,
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
from bootseer.storage.oci_options import Place
from bootseer.storage.oci_reference import Reference, referrers_tag, tree_tag

MOST_PAGES = 16
MOST_REFERRERS = 4096
MOST_CANDIDATES = 8  # of them, to find one that is a tree and is believed
_NO_API = (400, 404, 405, 501)


def read_tree(client: RegistryClient, reference: Reference, call: Call) -> TreeFiles:
    """The tree that is meant: the name's own, or the one that was pushed last for the image of that name.

    That one has a tag. Where there is no such tag, it is the newest that refers to the image, by what they say.
    Raises: NotFound when there is none, also when there is no such name; IntegrityError, StorageError.
    """
    where = str(reference)
    document = client.read_document(reference, call)
    if is_tree(document, where):
        return tree_files(document, where)
    tagged = _read_tagged(client, reference, document.digest, call)
    if tagged is not None:
        return tagged
    failure: IntegrityError | NotFound = NotFound(
        f"{where}: is no tree, and none refers to it: `bootseer image build` makes one of an image"
    )
    for found in _candidates(client, reference, document.digest, call):
        try:
            return tree_files(client.read_document(reference.at(found.digest), call), where)
        except (IntegrityError, NotFound) as error:
            failure = error  # anybody who may push here can have made it
    try:
        raise failure
    finally:
        del failure  # it holds this frame


def other_trees(client: RegistryClient, reference: Reference, besides: str, call: Call) -> list[str]:
    """Digests of the manifests of other trees that refer to the image of that name, the newest first; few."""
    document = client.read_document(reference, call)
    if is_tree(document, str(reference)):
        return []
    found = _candidates(client, reference, document.digest, call)
    return [each.digest for each in found if each.digest != besides]


def _candidates(client: RegistryClient, reference: Reference, digest: str, call: Call) -> list[Descriptor]:
    left = find_referrers(client, reference, digest, TREE, call)
    chosen: list[Descriptor] = []
    while len(chosen) < MOST_CANDIDATES and (found := newest(left)) is not None:
        chosen.append(found)
        left = [each for each in left if each.digest != found.digest]
    return chosen


def _read_tagged(client: RegistryClient, reference: Reference, digest: str, call: Call) -> TreeFiles | None:
    """None when there is no such tag, or it is that of something else. The registry first, as for referrers."""
    tag = tree_tag(digest)

    def read(place: Place) -> Document | None:
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
    client: RegistryClient, reference: Reference, digest: str, artifact_type: str, call: Call
) -> list[Descriptor]:
    """What refers to a manifest of the repository and is of this type.

    The registry itself is asked first: mirrors often know neither the API nor the tag.
    """
    found = client.from_any(
        reference, lambda place: _of_place(client, place, digest, artifact_type, call), is_origin_first=True
    )
    return [each for each in found if each.artifact_type == artifact_type]


def _of_place(
    client: RegistryClient, place: Place, digest: str, artifact_type: str, call: Call
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
    return parse_index(document, f"{place.name}:{tag}").manifests[:MOST_REFERRERS]


def _ask_api(
    client: RegistryClient, place: Place, digest: str, artifact_type: str, call: Call
) -> list[Descriptor] | None:
    """None when the registry has no such thing."""
    found: list[Descriptor] = []
    where = f"{place.name}: what refers to {digest}"
    url = f"{client.base_url(place, call)}/referrers/{digest}?{urlencode({'artifactType': artifact_type})}"
    for page in range(MOST_PAGES):
        exchange = client.get(place, url, {"Accept": INDEX}, call)
        content_type = exchange.headers.get("Content-Type", "").partition(";")[0].strip()
        if page == 0 and (exchange.status in _NO_API or (exchange.status == 200 and content_type != INDEX)):
            exchange.drop()  # some page for people
            return None
        if exchange.status != 200:
            raise client.refusal(exchange, place, where, call)
        data = client.http.read(exchange, MOST_MANIFEST_BYTES, call)
        found += parse_index(to_document(data, content_type, where), where).manifests
        link = next_page(", ".join(exchange.headers.get_all("Link") or []))
        if not link or len(found) >= MOST_REFERRERS:
            break
        following = resolve_location(url, link, exchange.shown)
        if not is_same_server(url, following):
            raise IntegrityError(f"{where}: the next page is said to be on another server")
        url = following
    return found[:MOST_REFERRERS]

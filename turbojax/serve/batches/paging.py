"""Lists of files and batches, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from turbojax.serve.openai_errors import ApiError


class Named(Protocol):
    """Something with an id."""

    id: str


Item = TypeVar("Item", bound=Named)


class Page(NamedTuple, Generic[Item]):
    """A piece of a list."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(items: Sequence[Item], after: str | None, limit: int) -> Page[Item]:
    """At most `limit` items behind the one with the id `after`.

    Raises:
        ApiError: 400, no item has it.
    """
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(400, f"after: no such id: '{after}'", param="after")
        start = places[0] + 1
    data = list(items[start : start + limit])
    return Page(
        data, data[0].id if data else None, data[-1].id if data else None, has_more=start + len(data) < len(items)
    )

"""The prefix cache: whole pages of committed KV, kept after their request and shared by those that begin alike.

A page is `size` consecutive tokens from a multiple of `size` on, and the slots that hold their KV, the target's and
the drafter's alike (both pools share slot numbers). Pages hang in one tree a namespace (SGLang's extra_key): a page
is found only under the very tokens that precede it, so a hit is exact. Only committed tokens get here: the accepted
path after its compaction, never a draft. Least recently used pages that nobody holds go first, leaves before parents.
Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .faults import Fault
from .kv import SlotTable


@dataclass(eq=False)
class _Page:
    parent: _Page | None = None
    tokens: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    owned: int = 0
    children: dict[tuple[int, ...], _Page] = field(default_factory=dict)
    holders: int = 0
    used: int = 0


@dataclass
class Lease:
    """A request's row of slots, the pages it holds (from the first on, without gaps) and how many tokens they gave."""

    row: int
    cached: int
    namespace: str
    pages: list[_Page]


class PrefixCache:
    """Hands out rows of slots, the front of them from the cache where it can. With `size` None nothing is kept."""

    def __init__(self, table: SlotTable, size: int | None, fault: Fault | None = None) -> None:
        self.table = table
        self._fault = fault
        self._size = size
        self._roots: dict[str, _Page] = {}
        self._clock = 0
        self._unheld = 0
        self._held = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is ever kept."""
        return self._size is not None

    @property
    def free(self) -> int:
        """Slots that a request could have: free ones and those of pages that nobody holds."""
        return self.table.free + self._unheld

    @property
    def cached(self) -> int:
        """Slots in pages, held or not."""
        return self._held + self._unheld

    def join(self, tokens: Sequence[int], most: int, count: int, namespace: str) -> Lease | None:
        """A row of `count` slots that begins with cached pages of `tokens`, at most `most` tokens of them.

        None while there is no room. Raises ValueError if it can never fit.
        """
        if self._fault is Fault.EXTRA_KEY_IGNORED:
            namespace = ""
        lease = Lease(-1, 0, namespace, [])
        for page in self._find(tokens[:most], namespace):
            self._hold(lease, page)
        shared = [slot for page in lease.pages for slot in page.slots]
        lease.cached = len(shared)
        # No eviction for a request that lacks a row, or more than eviction could give.
        if self.table.has_row and count - len(shared) <= self.free:
            self._evict(count - len(shared))
        row = self.table.allocate(count, shared)
        if row is None:
            self._let_go(lease)
            return None
        lease.row = row
        return lease

    def keep(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Keep the full pages of `tokens`, which are committed in the lease's row; their slots leave its ownership.

        A page that is there already stays as it is; the lease's own copy of it is freed with the row.
        """
        # No root for nothing: each fresh namespace with a short text would leave one for ever.
        if self._size is None or len(tokens) < (len(lease.pages) + 1) * self._size:
            return
        parent = lease.pages[-1] if lease.pages else self._roots.setdefault(lease.namespace, _Page())
        for start in range(len(lease.pages) * self._size, len(tokens) - self._size + 1, self._size):
            key = self._key(tokens, start, self._size)
            page = parent.children.get(key)
            if page is None:
                slots = self.table.disown(lease.row, start, start + self._size)
                page = _Page(parent, key, slots, owned=self._size)
                parent.children[key] = page
                self._unheld += self._size
            self._hold(lease, page)
            parent = page

    def leave(self, lease: Lease, aborted: bool = False) -> None:
        """Give the row back; the pages stay. Raises KeyError when it was given back before."""
        self.table.release(lease.row)
        pages = lease.pages
        self._let_go(lease)
        if aborted and self._fault is Fault.SLOT_REUSED_AFTER_ABORT:
            self._free_in_place(pages)

    def flush(self) -> None:
        """Forget every page that nobody holds."""
        self._evict(self.table.slots)

    def _find(self, tokens: Sequence[int], namespace: str) -> list[_Page]:
        found: list[_Page] = []
        page = self._roots.get(namespace)
        while page is not None and self._size is not None and len(tokens) >= (len(found) + 1) * self._size:
            page = page.children.get(self._key(tokens, len(found) * self._size, self._size))
            if page is not None:
                found.append(page)
        return found

    def _key(self, tokens: Sequence[int], start: int, size: int) -> tuple[int, ...]:
        if self._fault is Fault.CACHED_PREFIX_OF_ANOTHER:
            size = 1
        return tuple(tokens[start : start + size])

    def _hold(self, lease: Lease, page: _Page) -> None:
        self._clock += 1
        page.used = self._clock
        lease.pages.append(page)
        if not page.holders:
            self._unheld -= page.owned
            self._held += page.owned
        page.holders += 1

    def _let_go(self, lease: Lease) -> None:
        for page in lease.pages:
            page.holders -= 1
            if not page.holders:
                self._unheld += page.owned
                self._held -= page.owned
        lease.pages = []

    def _free_in_place(self, pages: list[_Page]) -> None:
        """Planted: the slots of unheld pages are free, the pages still there to be found."""
        for page in pages:
            if not page.holders:
                self.table.reclaim(page.slots[: page.owned])
                self._unheld -= page.owned
                page.owned = 0

    def _evict(self, wanted: int) -> None:
        """Drop unheld pages, least recently used leaf first, until `wanted` slots are free or none is left."""
        if self.table.free >= wanted:
            return
        # Whoever holds a page holds its ancestors, so beneath an unheld page all are unheld.
        leaves = [(page.used, id(page), page) for page in self._leaves() if not page.holders]
        heapify(leaves)
        while leaves and self.table.free < wanted:
            page = heappop(leaves)[2]
            self.table.reclaim(page.slots[: page.owned])
            self._unheld -= page.owned
            parent = page.parent
            assert parent is not None
            del parent.children[page.tokens]
            if not parent.children and parent.parent is not None and not parent.holders:
                heappush(leaves, (parent.used, id(parent), parent))
        # A gate asks under a new namespace each time: their roots must not pile up.
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def _leaves(self) -> list[_Page]:
        found, stack = [], list(self._roots.values())
        while stack:
            page = stack.pop()
            stack.extend(page.children.values())
            if not page.children and page.parent is not None:
                found.append(page)
        return found

"""The content of the full screen: lines of styled text for the current state, fitted to any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console
from rich.text import Text

from kvforge.client.tables import BlockColumns
from kvforge.protocol.messages import LEFT, PoolStats, RequestRow

from .. import printing
from ..screen import printable
from . import cells
from .asking import ENDED, Told
from .columns import aligned

HEAD, FOOT = 2, 1
WHY_LINES = 3
HELP = (
    "q, Ctrl-C   leave",
    "up, down    select a request (also k, j): shows why it waits",
    "p           pause: freeze the screen",
    "h, ?        this help",
    "",
    *(f"{character} {name}" for character, name in zip(cells.CHARACTERS, cells.NAMES, strict=True)),
    "",
    "Where there are more blocks than cells, a cell shows the busiest of",
    "its blocks. Numbers and blocks come from the shared tables; the rest",
    "is queried once a second.",
)


@dataclass(frozen=True)
class Seen:
    """The state at one moment.

    Attributes:
        gauges: The gauges of the tables.
        rates: Rates by name, None if unknown.
        selected: A request's id, 0 for none.
        problem: Why the state is outdated, "" if it is not.
    """

    gauges: Mapping[str, int]
    rates: Mapping[str, float | None]
    blocks: BlockColumns
    told: Told = field(default_factory=Told)
    up: str = ""
    selected: int = 0
    paused: bool = False
    help: bool = False
    problem: str = ""


class View:
    """Draws the state.

    Args:
        colour: None follows the environment (NO_COLOR, TERM).
        plain: Use ASCII characters only.
    """

    def __init__(self, *, colour: bool | None = None, plain: bool = False) -> None:
        self._console = Console(
            file=StringIO(),
            force_terminal=True,
            no_color=None if colour is None else not colour,
            highlight=False,
            legacy_windows=False,
        )
        self._characters = cells.ASCII if plain else cells.CHARACTERS
        self._more = "..." if plain else "…"

    def lines(self, seen: Seen, width: int, height: int) -> list[str]:
        """Return at most `height` lines of at most `width` columns, with escape sequences for their styles."""
        texts = self.texts(seen, width, height)
        return [self._rendered(text, width) for text in texts]

    def texts(self, seen: Seen, width: int, height: int) -> list[Text]:
        """Return the same lines before rendering."""
        body = height - HEAD - FOOT
        head = self._head(seen)
        if seen.help:
            middle = [Text(line) for line in HELP]
        else:
            middle = self._body(seen, width, max(0, body))
        lines = [*head, *middle[: max(0, body)]]
        lines += [Text("")] * (height - FOOT - len(lines))
        foot = Text("q quit  ↑↓ select  p pause  h help" if self._more == "…" else "q quit  p pause  h help", "dim")
        return [self._cut(line, width) for line in [*lines[: max(0, height - FOOT)], foot][:height]]

    def _head(self, seen: Seen) -> list[Text]:
        gauges = seen.gauges
        problem = seen.problem or seen.told.problem
        health, model = seen.told.health, ""
        if health is not None and health.model is not None:
            model = f" {health.model.name}"
        first = Text.assemble(("kvforge", "bold"), printable(model), f" up {seen.up} ")
        if problem:
            first.append(printable(" ".join(problem.split())), "bold red")
        elif seen.paused:
            first.append("PAUSED", "bold yellow")
        elif health is not None and not health.ready:
            first.append(printable(f"not ready: {health.reason}"), "yellow")
        else:
            first.append("ready" if health is not None else "", "green")
        rates = [f"{_rate(seen.rates.get(name))} {unit}" for name, unit in UNITS.items()]
        counts = f"run {gauges['requests_running']} wait {gauges['requests_pending']} seq {gauges['sequences']}"
        return [first, Text("  ".join([*rates, counts]))]

    def _body(self, seen: Seen, width: int, room: int) -> list[Text]:
        stats = seen.told.stats
        pools = stats.pools if stats is not None else ()
        sections = {
            "requests": self._requests(seen, width),
            "workers": self._workers(seen),
            "tenants": self._tenants(seen),
        }
        shares = _shared_out({"map": max(1, 2 * len(pools), room // 2), **_sizes(sections)}, room)
        lines = self._map(seen, pools, width, shares["map"])
        for name in ("requests", "tenants", "workers"):
            found = sections[name][: shares[name]]
            if len(found) < len(sections[name]) and len(found) > 1:
                found[-1] = Text(f"{self._more} {len(sections[name]) - len(found) + 1} more lines", "dim")
            lines += found
        return lines

    def _map(self, seen: Seen, pools: Sequence[PoolStats], width: int, room: int) -> list[Text]:
        """Return a heading and cells for each pool, sharing the lines equally."""
        if not pools:
            return [Text("no pools: no worker is ready", "yellow")][:room]
        lines: list[Text] = []
        each = max(2, room // len(pools))
        for pool in pools:
            found = cells.states(seen.blocks, pool.base, pool.blocks)
            shown, blocks = cells.scaled(found, width * (each - 1))
            scale = f", {blocks} blocks a cell" if blocks > 1 else ""
            used = pool.referenced
            heading = Text.assemble((printable(pool.worker), "bold"), f" {used}/{pool.blocks} blocks used{scale}  ")
            for state, name in enumerate(cells.NAMES):
                heading.append(f"{self._characters[state]} ", cells.STYLES[state])
                heading.append(f"{name} ")
            lines.append(heading)
            for runs in cells.rows(shown, width):
                line = Text()
                for state, length in runs:
                    line.append(self._characters[state] * length, cells.STYLES[state])
                lines.append(line)
        return lines[:room]

    def _requests(self, seen: Seen, width: int) -> list[Text]:
        alive = listed(seen.told)
        if not alive:
            return [Text("no requests", "dim")]
        rows = [(f"requests {len(alive)}", "state", "tenant", "prompt", "answer", "age", "why it waits")]
        for row in alive:
            chosen, why = row.request_id == seen.selected, self._why(seen, row)
            answer, age = f"{row.generated_tokens}/{row.max_tokens}", f"{row.age_us / 1e6:.0f} s"
            about = (row.state, printable(row.tenant), str(row.prompt_tokens), answer, age)
            rows.append((f"{row.request_id}", *about, "" if chosen else why))
        head, *texts = aligned(rows, right=(3, 4, 5))
        lines = [Text(f"  {head}", "bold dim")]
        for row, text in zip(alive, texts, strict=True):
            chosen = row.request_id == seen.selected
            lines.append(Text(f"{'>' if chosen else ' '} {text}", "reverse" if chosen else ""))
            if chosen and (why := self._why(seen, row)):
                wrapped = Text(why, "italic").wrap(self._console, max(1, width - 4))
                lines += [Text("    ") + part for part in wrapped[:WHY_LINES]]
        return lines

    def _why(self, seen: Seen, row: RequestRow) -> str:
        return printable(" ".join(seen.told.why.get(row.request_id, "").split()))

    def _tenants(self, seen: Seen) -> list[Text]:
        stats = seen.told.stats
        if stats is None or not stats.tenants:
            return []
        total = max(1, sum(pool.blocks for pool in stats.pools))
        rows = [(f"tenants {len(stats.tenants)}", "blocks", "share", "waiting", "weight", "")]
        for tenant in sorted(stats.tenants, key=lambda tenant: -tenant.blocks):
            share = tenant.blocks / total
            bar = ("#" if self._more == "..." else "━") * round(share * 20)
            counts = (str(tenant.blocks), f"{share:.0%}", str(tenant.pending), f"{tenant.weight:g}")
            rows.append((printable(tenant.tenant), *counts, bar))
        return _table(rows, right=(1, 2, 3, 4))

    def _workers(self, seen: Seen) -> list[Text]:
        health = seen.told.health
        if health is None:
            return []
        rows = [(f"workers {len(health.workers)}", "state", "steps", "memory by purpose")]
        for worker in health.workers:
            state = worker.state if worker.state != "loading" else f"{worker.phase} {worker.progress:.0%}"
            purposes = ", ".join(f"{name} {printing.size(held)}" for name, held in worker.device_bytes.items())
            rows.append((printable(worker.title), printable(state), str(worker.steps), purposes))
        lost = [(name, how) for name, how in health.gone.items() if not how.startswith(LEFT)]
        rows += [(printable(name), "lost", "", printable(how)) for name, how in lost]
        lines = _table(rows, right=(2,))
        for line in lines[len(lines) - len(lost) :]:
            line.stylize("yellow")
        return lines

    def _cut(self, text: Text, width: int) -> Text:
        text = text.copy()
        text.truncate(width, overflow="crop" if self._more == "..." else "ellipsis")
        return text

    def _rendered(self, text: Text, width: int) -> str:
        with self._console.capture() as captured:
            self._console.print(text, end="", width=width, no_wrap=True, overflow="crop")
        return captured.get()


UNITS = {"tokens_per_s": "tokens/s", "steps_per_s": "steps/s"}


def listed(told: Told) -> list[RequestRow]:
    """Return the shown requests in order: waiting ones first, the oldest of each state first."""
    alive = [row for row in told.requests if row.state not in ENDED]
    return sorted(alive, key=lambda row: (row.state == "running", -row.age_us))


def _sizes(sections: Mapping[str, Sequence[Text]]) -> dict[str, int]:
    return {name: len(lines) for name, lines in sections.items()}


def _shared_out(wanted: Mapping[str, int], room: int) -> dict[str, int]:
    """Distribute lines to the sections, one at a time in turn; the map gets the rest."""
    given = dict.fromkeys(wanted, 0)

    while room and (hungry := [name for name in wanted if given[name] < wanted[name]]):
        for name in hungry[:room]:
            given[name] += 1
        room -= len(hungry[:room])
    return {**given, "map": given["map"] + room}


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[Text]:
    """Return lines of aligned cells below their heading."""
    head, *lines = aligned(rows, right)
    return [Text(f"  {head}", "bold dim"), *(Text(f"  {line}") for line in lines)]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
